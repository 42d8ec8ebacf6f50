"""Goodput: the part of a run's wall time that went into steps which count, and where the rest went.

Computed from the events of rank 0, over all starts of the run. A rank writes an event `time` after every save
and at its end, with its seconds by phase since it was started. What came after the step from which the next
start resumed is lost. The time between a run that was stopped on purpose and its next start does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.observe.events import Event, events_path, read_events
from meshwright.units import show_seconds

PHASES = ("build", "first_step", "step", "data", "save", "evaluate")
"""Names of the seconds in an event `time`, each with the suffix `_seconds`."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by what they went into."""

    step: float = 0.0
    """Steps that count, without waiting for data and without the first step of each start."""
    start: float = 0.0
    """The first start: imports, building, loading."""
    compile: float = 0.0
    """The first step of each start, in which blocks are compiled and kernels are chosen."""
    data: float = 0.0
    """Waiting for batches."""
    checkpoint: float = 0.0
    """Standing still for checkpoints."""
    evaluate: float = 0.0
    restart: float = 0.0
    """From the end of an attempt to the first step of the next."""
    lost: float = 0.0
    """Steps after the newest checkpoint of an attempt that failed, and the time until it was ended."""
    other: float = 0.0
    """Everything else."""
    num_restarts: int = 0
    lost_steps: int = 0

    @property
    def wall_seconds(self) -> float:
        """Wall time of the run, without the time in which it was stopped on purpose."""
        return sum(getattr(self, one.name) for one in fields(self) if one.type in (float, "float"))

    @property
    def share(self) -> float:
        """Goodput: time of steps that count / wall time."""
        return self.step / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def causes(self) -> str:
        """Where the rest of the wall time went: every cause of 0.1% or more."""
        wall = self.wall_seconds or 1.0
        causes = ("start", "compile", "data", "checkpoint", "evaluate", "restart", "lost", "other")
        parts = [f"{name} {getattr(self, name) / wall:.1%}" for name in causes]
        return ", ".join(part for part in parts if not part.endswith(" 0.0%")) or "no loss"

    def line(self) -> str:
        """One line for people: the goodput and every other cause of 0.1% or more."""
        plural = "s" if self.num_restarts > 1 else ""
        restarts = f", {self.num_restarts} restart{plural}" if self.num_restarts else ""
        wall = show_seconds(self.wall_seconds or 1.0)
        return f"goodput {self.share:.1%} of {wall}{restarts}; {self.causes()}"


@dataclass(frozen=True)
class _Mark:
    """An event `time`: seconds since the process began, by phase."""

    at: float
    step: int
    seconds: dict[str, float]


@dataclass
class _Session:
    """One start of the ranks."""

    began_at: float
    built_at: float
    """When it was ready for its first step."""
    first_step: int
    marks: list[_Mark]
    ended_at: float
    is_restarted: bool = False
    """Whether the supervisor started the ranks again afterwards."""
    lost_steps: int = 0
    overlap_seconds: float = 0.0
    """How much earlier than the end of the start before this one began, by the clocks that were read."""


def read_goodput(run_dir: Path | str) -> Goodput | None:
    """The goodput of a run so far; None where its events say nothing about time."""
    return goodput_of(read_events(events_path(run_dir, 0)))


def goodput_of(events: Sequence[Event], *, until: float | None = None) -> Goodput | None:
    """The goodput by the events of rank 0; None where they say nothing about time.

    `until` is when the newest step of a run that goes on was recorded, in seconds since 1970: what came after
    the last event `time` counts as steps. Without it the last event `time` ends the account.
    """
    sessions = _sessions(events)
    if sessions and until is not None:
        _extend(sessions[-1], until)
    return _account(sessions) if any(session.marks for session in sessions) else None


def _extend(session: "_Session", until: float) -> None:
    """Count the time from the last event `time` of a start to `until` as steps."""
    nothing = dict.fromkeys(PHASES, 0.0) | {"build": session.built_at - session.began_at}
    last = session.marks[-1] if session.marks else _Mark(session.built_at, session.first_step, nothing)
    if session.is_restarted or until <= last.at:
        return
    seconds = {**last.seconds, "step": last.seconds["step"] + until - last.at}
    session.marks.append(_Mark(until, last.step, seconds))
    session.ended_at = max(session.ended_at, until)


def _sessions(events: Sequence[Event]) -> list[_Session]:
    sessions: list[_Session] = []
    for event in events:
        at, kind = float(event["time"]), event["kind"]
        if kind in ("start", "resume"):
            began = _number(event.get("began_at"), at)
            after = sessions[-1].ended_at if sessions and sessions[-1].is_restarted else began
            overlap = max(0.0, after - began)
            step = int(_number(event.get("step"), 0))
            sessions.append(_Session(began + overlap, at, step, [], at, overlap_seconds=overlap))
        elif sessions and kind == "time":
            seconds = {name: _number(event.get(f"{name}_seconds"), 0.0) for name in PHASES}
            sessions[-1].marks.append(_Mark(at, int(_number(event.get("step"), 0)), seconds))
        elif sessions and kind == "restart":
            sessions[-1].is_restarted = True
            sessions[-1].lost_steps = int(_number(event.get("lost_steps"), 0))
            at = _number(event.get("failed_at"), at)
        if sessions:
            sessions[-1].ended_at = max(sessions[-1].ended_at, at)
    return sessions


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _account(sessions: list[_Session]) -> Goodput:
    sums = dict.fromkeys(
        ("step", "start", "compile", "data", "checkpoint", "evaluate", "restart", "lost"), 0.0
    )
    wall = 0.0
    for index, session in enumerate(sessions):
        resumed = min((later.first_step for later in sessions[index + 1 :]), default=None)
        kept = [mark for mark in session.marks if resumed is None or mark.step <= resumed]
        seconds = kept[-1].seconds if kept else dict.fromkeys(PHASES, 0.0)
        build = seconds["build"] or (session.marks[0].seconds["build"] if session.marks else 0.0)
        build = max(0.0, build - session.overlap_seconds)
        sums["restart" if index and sessions[index - 1].is_restarted else "start"] += build
        step = seconds["step"] - seconds["data"]
        sums["step"] += max(0.0, step)
        sums["compile"] += seconds["first_step"] + min(0.0, step)  # the first batch was waited for there
        sums["data"] += seconds["data"]
        sums["checkpoint"] += seconds["save"]
        sums["evaluate"] += seconds["evaluate"]
        if resumed is not None:
            sums["lost"] += max(0.0, session.ended_at - (kept[-1].at if kept else session.began_at + build))
        wall += max(0.0, session.ended_at - session.began_at)
    gaps = [
        max(0.0, after.began_at - before.ended_at)
        for before, after in pairwise(sessions)
        if before.is_restarted
    ]
    sums["restart"] += sum(gaps)
    other = max(0.0, wall + sum(gaps) - sum(sums.values()))
    restarted = [session for session in sessions if session.is_restarted]
    return Goodput(
        **sums,
        other=other,
        num_restarts=len(restarted),
        lost_steps=sum(session.lost_steps for session in restarted),
    )
