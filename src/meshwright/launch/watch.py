"""Watches local ranks from outside: ranks that are stopped or make no progress are reported and ended.

Time is counted in short ticks of this process. When it is suspended together with its ranks (a scheduler, a
closed laptop), the pause does not count as time without progress.
"""

import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshwright.launch.heartbeat import Heartbeat, HeartbeatReader, heartbeat_path
from meshwright.launch.rank_process import RankProcess
from meshwright.launch.stack_report import threads_of, where_is
from meshwright.spec.resilience import Phase, ResilienceSpec

STACK_SIGNAL = signal.SIGUSR2
"""Asks a rank to write the stacks of its threads to `stack_path`."""
_TICK_SECONDS, _SHORTEST_TICK_SECONDS = 0.25, 0.05
# A longer time between two ticks: this process was suspended.
_LONGEST_TICK_SECONDS = 5.0
_STACK_SECONDS, _STACK_PAUSE_SECONDS = 2.0, 0.05
_MOST_STACKS, _MOST_RANKS, _MOST_STACK_LINES = 4, 16, 60
# A run is known well enough for a bound of its own after so many heartbeats; that bound is at least so long.
_KNOWN_AFTER, _SHORTEST_BOUND_SECONDS = 30, 60.0


def stack_path(folder: Path, rank: int) -> Path:
    """The file to which a local rank writes its stacks when it is asked."""
    return folder / f"rank-{rank}.stack"


def is_stopped(process: RankProcess) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


@dataclass(frozen=True)
class Watched:
    """What is watched: the run directory with the heartbeats, and the timeouts."""

    run_dir: Path
    resilience: ResilienceSpec
    is_adaptive: bool = True
    """Whether the bound of a step follows from the steps before; not where a step may compile blocks anew."""

    @property
    def is_restarted(self) -> bool:
        """Whether the ranks are restarted after a failure: those that have not failed are killed soon."""
        return self.resilience.restart.max_restarts > 0


class _RankWatch:
    """One rank: its last heartbeat, and for how long it has not changed."""

    def __init__(self, rank: int, process: RankProcess, run_dir: Path) -> None:
        self.rank, self.process = rank, process
        self.heartbeat: Heartbeat | None = None
        self.idle_seconds = 0.0
        self.num_steps_seen, self.longest_step_seconds = 0, 0.0
        """Changes of the heartbeat in the phase `step`, and the longest time between two of them."""
        self.stopped_seconds: float | None = None
        """For how long the rank has been stopped; None while it is not."""
        self.reader = HeartbeatReader(heartbeat_path(run_dir, rank), process.pid)

    def tick(self, seconds: float) -> None:
        """Look at the rank, `seconds` after the last time."""
        stopped_before = 0.0 if self.stopped_seconds is None else self.stopped_seconds + seconds
        self.stopped_seconds = stopped_before if is_stopped(self.process) else None
        found = self.reader.read()
        if found is not None and found != self.heartbeat:
            if found.phase == "step" and self.phase == "step":
                self.num_steps_seen += 1
                self.longest_step_seconds = max(self.longest_step_seconds, self.idle_seconds + seconds)
            self.heartbeat, self.idle_seconds = found, 0.0
        else:
            self.idle_seconds += seconds

    @property
    def phase(self) -> Phase:
        """What the rank is doing."""
        return self.heartbeat.phase if self.heartbeat else "start"

    @property
    def step(self) -> int:
        """Steps that are done; -1 before the run is built."""
        return self.heartbeat.step if self.heartbeat else -1

    def describe(self) -> str:
        """One line: rank, host, process, state, last step, phase."""
        state = "is stopped (SIGSTOP)" if self.stopped_seconds is not None else "makes no progress"
        done = f"last step {self.step}, phase {self.phase}" if self.heartbeat else "before its first step"
        return (
            f"rank {self.rank} on {socket.gethostname()} (process {self.process.pid}) {state}: {done}, "
            f"no progress for {self.idle_seconds:.0f} s"
        )


class RankWatcher:
    """Watches the ranks of one run; `tick` is called often by the process that started them."""

    def __init__(
        self, watched: Watched, processes: Sequence[RankProcess], folder: Path, *, first_rank: int = 0
    ) -> None:
        """`first_rank` is the rank of the first process, on nodes after the first one."""
        self._resilience, self._folder = watched.resilience, folder
        self._is_adaptive = watched.is_adaptive
        numbered = enumerate(processes, first_rank)
        self._ranks = [_RankWatch(rank, process, watched.run_dir) for rank, process in numbered]
        self._ticked_at, self._tick_seconds = time.monotonic(), _TICK_SECONDS
        self._announced: set[int] = set()
        self.hanging: int | None = None
        """The rank that `tick` found to hang, counted from 0 on this machine; None where several do."""

    @property
    def reached_step(self) -> int | None:
        """Steps that any rank has done, by its last heartbeat; None where none is past its first step."""
        found = [one.reader.read() or one.heartbeat for one in self._ranks]
        return max((last.step for last in found if last and last.phase != "start"), default=None)

    def tick(self) -> str | None:
        """Look at all ranks; where one exceeds its timeout, all are reported, and its line is returned."""
        now = time.monotonic()
        seconds = now - self._ticked_at
        if seconds < self._tick_seconds:
            return None
        self._ticked_at = now
        living = [one for one in self._ranks if one.process.poll() is None]
        for one in living:
            one.tick(seconds if seconds < _LONGEST_TICK_SECONDS else 0.0)
        self._announce_stopped(living)
        left = min((self._seconds_left(one) for one in living), default=_TICK_SECONDS)
        if left >= 0:
            self._tick_seconds = min(_TICK_SECONDS, max(_SHORTEST_TICK_SECONDS, left))
            return None
        culprits = _culprits(living)
        self.hanging = self._ranks.index(culprits[0]) if len(culprits) == 1 else None
        text = culprits[0].describe()
        self._report(living, culprits)
        return text

    def close(self) -> None:
        """Close the heartbeat files."""
        for one in self._ranks:
            one.reader.close()

    def _seconds_left(self, one: _RankWatch) -> float:
        """Time until the timeout of a rank; negative after it. A stopped rank does nothing, whatever its last
        phase was: it has the time of a step."""
        if one.stopped_seconds is not None:
            return self._resilience.step_timeout_seconds - one.stopped_seconds
        return self._bound(one) - one.idle_seconds

    def _bound(self, one: _RankWatch) -> float:
        """Longest time without progress: the timeout of the phase, or less where steps were short so far."""
        bound, factor = self._resilience.timeout_seconds(one.phase), self._resilience.hang_factor
        is_known = self._is_adaptive and one.num_steps_seen >= _KNOWN_AFTER
        if one.phase != "step" or factor is None or not is_known:
            return bound
        return min(bound, max(_SHORTEST_BOUND_SECONDS, factor * one.longest_step_seconds))

    def _announce_stopped(self, living: list[_RankWatch]) -> None:
        """Say once that a rank was stopped: it may be continued before the timeout."""
        for one in living:
            if one.stopped_seconds is not None and one.rank not in self._announced:
                print(
                    f"note: rank {one.rank} (process {one.process.pid}) is stopped; without SIGCONT the run "
                    f"ends after {self._resilience.step_timeout_seconds:g} s",
                    file=sys.stderr,
                    flush=True,
                )
        self._announced = {one.rank for one in living if one.stopped_seconds is not None}

    def _report(self, living: list[_RankWatch], culprits: list[_RankWatch]) -> None:
        """Print where every rank is, and the stacks of those that hold the others up."""
        late = culprits[0]
        key = self._resilience.timeout_key("step" if late.stopped_seconds is not None else late.phase)
        if late.stopped_seconds is None and late.idle_seconds < getattr(self._resilience, key):
            key = "hang_factor"
        lines = [one.describe() for one in culprits[:_MOST_STACKS]]
        others = [one for one in living if one not in culprits]
        stacks = self._stacks([*culprits, *others][:_MOST_RANKS])
        waiting = [f"rank {one.rank} waits: last step {one.step}, phase {one.phase}" for one in others]
        print(
            f"error: {lines[0]}",
            *(f"       {line}" for line in [*lines[1:], *waiting[:_MOST_STACKS]]),
            f"  where: resilience.{key}={getattr(self._resilience, key):g}",
            "  hint:  look at the stacks below; started again, the run resumes from its newest checkpoint; a "
            "longer timeout is set with this key",
            *(f"rank {rank} is {where_is(text)}" for rank, text in sorted(stacks.items())),
            *(line for rank, text in stacks.items() for line in _stack_lines(rank, text)),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )

    def _stacks(self, culprits: list[_RankWatch]) -> dict[int, str]:
        """The stacks that these ranks write when they are asked, by rank. A stopped rank must run for that:
        it is continued, and ended right afterwards."""
        for one in culprits:
            with suppress(OSError):
                one.process.send_signal(STACK_SIGNAL)
                if one.stopped_seconds is not None:
                    one.process.send_signal(signal.SIGCONT)
        self._await_stacks(culprits)
        return {one.rank: self._stack(one) for one in culprits}

    def _await_stacks(self, culprits: list[_RankWatch]) -> None:
        """Wait until all have written and none has written more for a moment: threads come one by one."""
        deadline = time.monotonic() + _STACK_SECONDS
        sizes, before = self._stack_sizes(culprits), None
        while time.monotonic() < deadline and (0 in sizes or sizes != before):
            time.sleep(_STACK_PAUSE_SECONDS)
            sizes, before = self._stack_sizes(culprits), sizes

    def _stack_sizes(self, culprits: list[_RankWatch]) -> list[int]:
        paths = [self._stack_path(one) for one in culprits]
        return [path.stat().st_size if path.is_file() else 0 for path in paths]

    def _stack_path(self, one: _RankWatch) -> Path:
        return stack_path(self._folder, one.rank)

    def _stack(self, one: _RankWatch) -> str:
        path = self._stack_path(one)
        return path.read_text(errors="replace").strip() if _has_text(path) else ""


def _stack_lines(rank: int, text: str) -> list[str]:
    lines = "\n\n".join(threads_of(text)).splitlines()
    lines = lines or ["  (it wrote none: it is not running Python code)"]
    return [f"stack of rank {rank}:", *lines[:_MOST_STACK_LINES]]


def _culprits(living: list[_RankWatch]) -> list[_RankWatch]:
    """The ranks that the others wait for: stopped ones, else those that are furthest behind."""
    stopped = [one for one in living if one.stopped_seconds is not None]
    if stopped:
        return stopped
    least = min(one.step for one in living)
    return [one for one in living if one.step == least]


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
