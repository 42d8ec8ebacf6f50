"""Which contenders are on the device, and when each is timed: A-B-A-B interleaved timing of live processes.

Many processes start at once, import, build and compile at the same time, and then wait without weights on
the device. Where a peer has several settings, each is timed once and the fastest takes part in the rounds.
Entries that fit on the device together (all idle, the largest of them running) form a group: they warm up,
and windows go round, A-B-C-A-B-C, while nothing else computes. Then comes the next group. An entry that fits
beside no other is timed alone.
"""

import dataclasses
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.interleaved.process import CONTEXT_BYTES, ContenderProcess, Entry

# Processes that build at once and that are alive at once: more would compete for cores and host memory.
MOST_BUILDING, MOST_ALIVE = 14, 24
# An entry that needs a larger share of the device than this is timed alone.
ALONE_SHARE = 0.9
# Share of the device up to which several warm up at once, since their bytes are estimates.
BESIDE_SHARE = 0.8


@dataclass(frozen=True)
class Pace:
    """How many windows there are and how long they take."""

    rounds: int = 2
    seconds: float = 2.5
    """Length of a timed window."""
    fewest_steps: int = 2
    """Steps of a window, however long they take."""
    warmup_steps: int = 1
    timeout_seconds: float = 240.0
    """Time limit of one state of one contender."""


def used_bytes(processes: Iterable[ContenderProcess]) -> int:
    """Device bytes that these processes hold now, at most."""
    return sum(map(_bytes_now, processes))


def _bytes_now(process: ContenderProcess) -> int:
    if process.state in ("new", "importing", "imported", "ended"):
        return 0
    if process.state == "building":
        return process.entry.built_bytes + CONTEXT_BYTES
    if process.state == "compiled":
        return CONTEXT_BYTES
    return process.idle_bytes if process.state == "idle" else process.peak_bytes


def group_bytes(group: Sequence[ContenderProcess], num_waiting: int = 0) -> int:
    """Device bytes of a group: all idle and the largest running; `num_waiting` others hold a context each."""
    extra = max((process.peak_bytes - process.idle_bytes for process in group), default=0)
    return sum(process.idle_bytes for process in group) + extra + num_waiting * CONTEXT_BYTES


class InterleavedSchedule:
    """The driver. `report(kind, process)` is called after each window of a process, and when one fails.

    The kind is `sweep` (one setting of several), `round`, `long_step` (more micro-batches) or `error`.
    """

    def __init__(
        self, budget_bytes: int, pace: Pace, folder: Path, report: Callable[[str, ContenderProcess], None]
    ) -> None:
        self._budget_bytes, self._pace, self._folder, self._report = budget_bytes, pace, folder, report
        self._selector = selectors.DefaultSelector()
        self._processes: list[ContenderProcess] = []
        self._to_retry: list[Entry] = []
        """Entries that ran out of memory beside others: they are tried again, alone."""

    def run(
        self, entries: Sequence[Entry], make: Callable[[Entry], ContenderProcess] = ContenderProcess
    ) -> None:
        """Measure all entries, case by case; one that fails is reported and the others go on."""
        self._make = make
        self._processes = [make(entry) for entry in entries]
        try:
            for case in dict.fromkeys(entry.case for entry in entries):
                self._run_case(case)
        finally:
            for process in self._processes:
                if process.state not in ("new", "ended"):
                    self._end(process)

    def _run_case(self, case: str) -> None:
        processes = [one for one in self._processes if one.entry.case == case]
        alone = [one for one in processes if one.entry.peak_bytes > ALONE_SHARE * self._budget_bytes]
        others = [one for one in processes if one not in alone]
        if self._can_share(others):
            others = self._best_settings(others)
        self._run_groups(others)
        self._run_groups(alone)
        again = [self._make(entry) for entry in self._to_retry]
        self._to_retry.clear()
        self._processes += again
        self._run_groups(again)

    def _can_share(self, processes: list[ContenderProcess]) -> bool:
        """Whether one setting of every peer fits on the device at the same time; else a sweep is no use."""
        peers = dict.fromkeys(_peer(one) for one in processes if not one.entry.is_fp8)
        smallest = [
            min((one for one in processes if _peer(one) == peer), key=lambda one: one.peak_bytes)
            for peer in peers
        ]
        return group_bytes(smallest) <= self._budget_bytes

    # ---- the sweep: every setting once ----------------------------------------------------------

    def _best_settings(self, processes: list[ContenderProcess]) -> list[ContenderProcess]:
        """Time each setting of a peer that has several; the fastest of each, and peers with one setting.

        The largest come first, while no process is idle on the device. The fastest one stays if all that are
        still to come fit beside it; else it is ended, and built again from the compiler's cache.
        """
        peers = [_peer(one) for one in processes]
        several = [one for one in processes if peers.count(_peer(one)) > 1]
        single = [one for one in processes if one not in several]
        waiting = sorted(several, key=lambda one: -one.peak_bytes)
        fastest: list[ContenderProcess] = []
        while new := self._admitted(fastest, waiting):
            waiting = [one for one in waiting if one not in new]
            self._warm_up(fastest, new, [*waiting, *single])
            for process in new:
                if process.state != "ended":
                    self._time(process, "sweep")
            fastest = [one for one in [*fastest, *new] if one.state != "ended"]
            for process in fastest:
                is_slower = any(_seconds(rival) < _seconds(process) for rival in self._rivals(process))
                if is_slower or not all(self._fits([*fastest, later], waiting) for later in waiting):
                    self._end(process)
            fastest = [one for one in fastest if one.state != "ended"]
        return [*map(self._alive, self._fastest(several)), *single]

    def _fastest(self, several: list[ContenderProcess]) -> list[ContenderProcess]:
        timed = [one for one in several if one.timings]
        return [
            min((one for one in timed if _peer(one) == peer), key=_seconds)
            for peer in dict.fromkeys(map(_peer, timed))
        ]

    def _alive(self, process: ContenderProcess) -> ContenderProcess:
        """The process itself, or a new one of the same entry if it was ended to make room."""
        if process.state != "ended":
            return process
        again = self._make(process.entry)
        again.timings = list(process.timings)
        again.peak_bytes, again.idle_bytes = process.peak_bytes, process.idle_bytes
        self._processes.append(again)
        return again

    # ---- groups ---------------------------------------------------------------------------------

    def _run_groups(self, waiting: list[ContenderProcess]) -> None:
        while waiting := [one for one in waiting if one.state != "ended"]:
            idle = [one for one in waiting if one.state == "idle"]
            group = [*idle, *self._admitted(idle, [one for one in waiting if one not in idle])]
            waiting = [one for one in waiting if one not in group]
            self._warm_up(idle, [one for one in group if one not in idle], waiting)
            self._rounds([one for one in group if one.state != "ended"])
            for process in group:
                if process.state != "ended":
                    self._end(process)

    def _admitted(
        self, group: list[ContenderProcess], waiting: list[ContenderProcess]
    ) -> list[ContenderProcess]:
        """The next processes of the same case that fit beside the group; the first of a group always does."""
        new: list[ContenderProcess] = []
        for process in waiting:
            if process.state == "ended" or process.entry.case != (group or new or [process])[0].entry.case:
                continue
            joined = [*group, *new, process]
            if len(joined) == 1 or self._fits(joined, waiting):
                new.append(process)
        return new

    def _fits(
        self, group: list[ContenderProcess], waiting: list[ContenderProcess], *, num_more: int = 0
    ) -> bool:
        """Whether a group fits while others of the case, and those already built, hold a context each."""
        case = group[0].entry.case
        others = [
            one
            for one in waiting
            if one not in group and (one.entry.case == case or one.state in ("building", "compiled"))
        ]
        return group_bytes(group, len(others) + num_more) <= self._budget_bytes

    # ---- warm-up: many at once, as device memory allows -----------------------------------------

    def _warm_up(
        self, group: list[ContenderProcess], new: list[ContenderProcess], later: list[ContenderProcess]
    ) -> None:
        """Warm the new processes up until they are idle; later ones compile meanwhile."""
        if not new:
            return
        case = new[0].entry.case
        later = [*later, *(one for one in self._processes if one.state != "ended" and one.entry.case != case)]
        while True:
            together = [one for one in [*group, *new] if one.state != "ended"] or new
            self._build([*new, *(one for one in later if one.entry.case == case)])
            if self._fits(together, later, num_more=1):
                self._build(later)
            self._grant_device(new)
            busy = [one for one in self._processes if one.state in ("importing", "building", "warming")]
            pending = [one for one in new if one.state not in ("idle", "ended")]
            if not busy and not pending:
                return
            self._receive()

    def _build(self, queue: list[ContenderProcess]) -> None:
        num_alive = sum(one.state not in ("new", "ended") for one in self._processes)
        for process in [one for one in queue if one.state == "new"][: max(0, MOST_ALIVE - num_alive)]:
            process.start(self._folder, warmup_steps=self._pace.warmup_steps)
            self._selector.register(process, selectors.EVENT_READ)
        num_building = sum(one.state == "building" for one in self._processes)
        for process in queue:
            needed = used_bytes(self._processes) + process.entry.built_bytes + CONTEXT_BYTES
            is_free = needed <= self._budget_bytes or not self._is_computing()
            if process.state == "imported" and num_building < MOST_BUILDING and is_free:
                process.command("building", command="build")
                num_building += 1

    def _grant_device(self, new: list[ContenderProcess]) -> None:
        """Let compiled processes run that fit beside those on the device; one always may if none computes."""
        for process in new:
            if process.state != "compiled":
                continue
            others = [one for one in self._processes if one is not process]
            warming = [one for one in others if one.state == "warming"]
            limit = self._budget_bytes * (BESIDE_SHARE if warming else 1.0)
            if used_bytes(others) + process.peak_bytes <= limit or not self._is_computing():
                for one in warming:
                    one.shares_device = True
                is_occupied = used_bytes(others) > self._budget_bytes / 20
                process.shares_device = bool(warming) or is_occupied
                process.command("warming", command="warm_up")

    def _is_computing(self) -> bool:
        return any(one.state in ("building", "warming") for one in self._processes)

    # ---- windows: one at a time ----------------------------------------------------------------

    def _rounds(self, group: list[ContenderProcess]) -> None:
        is_alone = len(group) == 1
        group = [one for one in group if not self._is_slower(one)]
        for number in range(self._pace.rounds):
            for process in group:
                if process.state != "ended":
                    is_last = number == self._pace.rounds - 1  # a profiler may slow what comes after it
                    lead_steps = 0 if is_alone and number else 1
                    self._time(
                        process, "round", is_profiled=is_last, keeps_memory=is_alone, lead_steps=lead_steps
                    )
        for process in group:
            factor = process.entry.accumulation_factor
            if factor and process.state != "ended":
                self._time(process, "long_step", accumulation_factor=factor, fewest_steps=2)

    def _is_slower(self, process: ContenderProcess) -> bool:
        """Whether another setting of the peer was faster in one window; the first setting is not timed."""
        rivals = self._rivals(process)
        if not rivals or process.timings:  # no other setting, or the fastest of a sweep already
            return False
        self._time(process, "sweep")
        return process.state == "ended" or _seconds(process) > min(map(_seconds, rivals))

    def _rivals(self, process: ContenderProcess) -> list[ContenderProcess]:
        """Other settings of the peer that have been timed."""
        same = [other for other in self._processes if _peer(other) == _peer(process)]
        return [other for other in same if other.entry.label != process.entry.label and other.timings]

    def _time(self, process: ContenderProcess, kind: str, **changed: Any) -> None:
        """One window of one contender while all others wait; it is reported when it has ended."""
        message: dict[str, Any] = {
            "seconds": self._pace.seconds,
            "fewest_steps": self._pace.fewest_steps,
            "lead_steps": 1,  # allocates the memory again that was freed after the last window
            "accumulation_factor": 1,
            "is_profiled": False,
            "keeps_memory": False,
        }
        before = len(process.timings)
        process.command("timing", command="time", **{**message, **changed})
        while process.state == "timing":
            self._receive()
        if len(process.timings) > before:
            factor = changed.get("accumulation_factor", 1)
            process.timings[-1] |= {"kind": kind, "accumulation_factor": factor}
            self._report(kind, process)

    # ---- messages ------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Process the messages that have arrived, and end contenders that exceed the time limit."""
        for key, _ in self._selector.select(timeout=1.0):
            process = key.fileobj
            assert isinstance(process, ContenderProcess)
            self._selector.unregister(process)
            process.receive()
            if process.state != "ended":
                self._selector.register(process, selectors.EVENT_READ)
            elif self._can_retry(process):
                self._to_retry.append(dataclasses.replace(process.entry, peak_bytes=self._budget_bytes))
            else:
                self._report("error", process)
        limit = self._pace.timeout_seconds
        for process in self._processes:
            is_working = process.state in ("importing", "building", "warming", "timing")
            if is_working and time.monotonic() - process.state_since > limit:
                state = process.state
                self._end(process, f"{state} took more than {limit:.0f} s")
                self._report("error", process)

    def _can_retry(self, process: ContenderProcess) -> bool:
        """Whether it ran out of memory that others held, for the first time."""
        is_second = process.entry.peak_bytes >= self._budget_bytes
        is_oom = "out of memory" in (process.error or "")
        # Waiting processes hold a context each, and some of them may be building.
        has_others = any(
            other is not process and other.state not in ("new", "ended") for other in self._processes
        )
        return is_oom and (process.shares_device or has_others) and not is_second

    def _end(self, process: ContenderProcess, error: str | None = None) -> None:
        self._selector.unregister(process)
        process.end(error)


def _seconds(process: ContenderProcess) -> float:
    found = [timing["step_seconds"] for timing in process.timings if timing["accumulation_factor"] == 1]
    return min(found, default=float("inf"))


def _peer(process: ContenderProcess) -> tuple[str, str]:
    return process.entry.case, process.entry.peer
