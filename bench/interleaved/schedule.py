"""Who is on the card, and whose turn it is: the order of everything that `bench/step.py` measures.

Many processes start at once, import, build and compile side by side, and then wait without their weights. The
settings of a peer that has several are timed once each, and its best goes on. Those that fit the card
together (all at rest, the largest of them running) form a group: they warm up, and turns go round,
A-B-C-A-B-C, while nobody else computes. Then the next group, until everyone was heard. What fits beside
nobody is timed alone.
"""

import dataclasses
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.interleaved.process import CONTEXT_BYTES, Entry, Resident

# More at once would only wait for one another's cores, and fill the host's memory.
MOST_BUILDING, MOST_ALIVE = 14, 24
# Who needs more than this of the card can only be alone.
ALONE_SHARE = 0.9
# Several warm up at once as long as their estimates leave some room: an estimate may be wrong.
BESIDE_SHARE = 0.8


@dataclass(frozen=True)
class Pace:
    """How long everything takes."""

    rounds: int = 2
    seconds: float = 2.5
    """Of a timed window."""
    fewest_steps: int = 2
    """Of a window, however long they take."""
    warmup_steps: int = 1
    timeout_seconds: float = 240.0
    """Of one state of one contender."""


def taken_bytes(residents: Iterable[Resident]) -> int:
    """What they hold on the card at this moment, at most."""
    return sum(map(_held_bytes, residents))


def _held_bytes(one: Resident) -> int:
    if one.state in ("new", "importing", "imported", "gone"):
        return 0
    if one.state == "building":
        return one.entry.built_bytes + CONTEXT_BYTES
    if one.state == "compiled":
        return CONTEXT_BYTES
    return one.rest_bytes if one.state == "resting" else one.peak_bytes


def group_bytes(group: Sequence[Resident], waiting: int = 0) -> int:
    """What a group needs: all at rest, the largest running; `waiting` others hold a context and no more."""
    extra = max((one.peak_bytes - one.rest_bytes for one in group), default=0)
    return sum(one.rest_bytes for one in group) + extra + waiting * CONTEXT_BYTES


class Turns:
    """The driver. `tell` gets each resident after each thing that was measured of it, or after its end."""

    def __init__(
        self, budget_bytes: int, pace: Pace, folder: Path, tell: Callable[[str, Resident], None]
    ) -> None:
        self._budget_bytes, self._pace, self._folder, self._tell = budget_bytes, pace, folder, tell
        self._selector = selectors.DefaultSelector()
        self._residents: list[Resident] = []
        self._crowded: list[Entry] = []
        """Ran out of memory beside others: they get another chance, alone."""

    def run(self, entries: Sequence[Entry], make: Callable[[Entry], Resident] = Resident) -> None:
        """Measure all of them, case by case; an entry that fails is told and the others go on."""
        self._make = make
        self._residents = [make(entry) for entry in entries]
        try:
            for case in dict.fromkeys(entry.case for entry in entries):
                self._run_case(case)
        finally:
            for one in self._residents:
                if one.state not in ("new", "gone"):
                    self._end(one)

    def _run_case(self, case: str) -> None:
        mine = [one for one in self._residents if one.entry.case == case]
        hopeless = [one for one in mine if one.entry.peak_bytes > ALONE_SHARE * self._budget_bytes]
        others = [one for one in mine if one not in hopeless]
        if self._can_share(others):
            others = self._swept(others)
        self._run_groups(others)
        self._run_groups(hopeless)
        again = [self._make(entry) for entry in self._crowded]
        self._crowded.clear()
        self._residents += again
        self._run_groups(again)

    def _can_share(self, mine: list[Resident]) -> bool:
        """Whether a setting of everyone could be on the card at the same time; else a sweep helps nobody."""
        sides = dict.fromkeys(_side(one) for one in mine if not one.entry.is_class_of_its_own)
        smallest = [
            min((one for one in mine if _side(one) == side), key=lambda one: one.peak_bytes) for side in sides
        ]
        return group_bytes(smallest) <= self._budget_bytes

    # ---- the sweep: every setting once ----------------------------------------------------------

    def _swept(self, mine: list[Resident]) -> list[Resident]:
        """Time each setting of a peer that has several; the best of each, and those that have but one.

        The largest come first, while nobody rests on the card. A best one stays there if everyone who is
        still to come fits beside it; else it ends, and is made again with all in the compiler's cache.
        """
        sides = [_side(one) for one in mine]
        several = [one for one in mine if sides.count(_side(one)) > 1]
        single = [one for one in mine if one not in several]
        waiting = sorted(several, key=lambda one: -one.peak_bytes)
        kept: list[Resident] = []
        while new := self._admitted(kept, waiting):
            waiting = [one for one in waiting if one not in new]
            self._warm(kept, new, [*waiting, *single])
            for one in new:
                if one.state != "gone":
                    self._turn(one, "sweep")
            kept = [one for one in [*kept, *new] if one.state != "gone"]
            for one in kept:
                is_beaten = any(_seconds(other) < _seconds(one) for other in self._rivals(one))
                if is_beaten or not all(self._fits([*kept, later], waiting) for later in waiting):
                    self._end(one)
            kept = [one for one in kept if one.state != "gone"]
        return [*map(self._present, self._best(several)), *single]

    def _best(self, several: list[Resident]) -> list[Resident]:
        timed = [one for one in several if one.timings]
        return [
            min((one for one in timed if _side(one) == side), key=_seconds)
            for side in dict.fromkeys(map(_side, timed))
        ]

    def _present(self, one: Resident) -> Resident:
        """The resident itself, or if it had to make room, another of the same entry."""
        if one.state != "gone":
            return one
        again = self._make(one.entry)
        again.timings = list(one.timings)
        again.peak_bytes, again.rest_bytes = one.peak_bytes, one.rest_bytes
        self._residents.append(again)
        return again

    # ---- groups ---------------------------------------------------------------------------------

    def _run_groups(self, waiting: list[Resident]) -> None:
        while waiting := [one for one in waiting if one.state != "gone"]:
            resting = [one for one in waiting if one.state == "resting"]
            group = [*resting, *self._admitted(resting, [one for one in waiting if one not in resting])]
            waiting = [one for one in waiting if one not in group]
            self._warm(resting, [one for one in group if one not in resting], waiting)
            self._rounds([one for one in group if one.state != "gone"])
            for one in group:
                if one.state != "gone":
                    self._end(one)

    def _admitted(self, group: list[Resident], waiting: list[Resident]) -> list[Resident]:
        """The next ones that fit beside the group, of the same case; the first of a group always does."""
        new: list[Resident] = []
        for one in waiting:
            if one.state == "gone" or one.entry.case != (group or new or [one])[0].entry.case:
                continue
            joined = [*group, *new, one]
            if len(joined) == 1 or self._fits(joined, waiting):
                new.append(one)
        return new

    def _fits(self, group: list[Resident], waiting: list[Resident], *, besides: int = 0) -> bool:
        """Whether all of a group can take turns while others of the case, and those already built, wait."""
        case = group[0].entry.case
        others = [
            one
            for one in waiting
            if one not in group and (one.entry.case == case or one.state in ("building", "compiled"))
        ]
        return group_bytes(group, len(others) + besides) <= self._budget_bytes

    # ---- warm-up: many at once, as the card's memory allows -------------------------------------

    def _warm(self, group: list[Resident], new: list[Resident], later: list[Resident]) -> None:
        """Bring the new ones to rest; later ones compile meanwhile, and nobody computes at the end."""
        if not new:
            return
        case = new[0].entry.case
        later = [*later, *(one for one in self._residents if one.state != "gone" and one.entry.case != case)]
        while True:
            together = [one for one in [*group, *new] if one.state != "gone"] or new
            self._build([*new, *(one for one in later if one.entry.case == case)])
            if self._fits(together, later, besides=1):
                self._build(later)
            self._lend(new)
            busy = [one for one in self._residents if one.state in ("importing", "building", "warming")]
            pending = [one for one in new if one.state not in ("resting", "gone")]
            if not busy and not pending:
                return
            self._listen()

    def _build(self, queue: list[Resident]) -> None:
        alive = sum(one.state not in ("new", "gone") for one in self._residents)
        for one in [one for one in queue if one.state == "new"][: max(0, MOST_ALIVE - alive)]:
            one.start(self._folder, warmup_steps=self._pace.warmup_steps)
            self._selector.register(one, selectors.EVENT_READ)
        building = sum(one.state == "building" for one in self._residents)
        for one in queue:
            needed = taken_bytes(self._residents) + one.entry.built_bytes + CONTEXT_BYTES
            is_free = needed <= self._budget_bytes or not self._is_computing()
            if one.state == "imported" and building < MOST_BUILDING and is_free:
                one.order("building", order="build")
                building += 1

    def _lend(self, new: list[Resident]) -> None:
        """Let those run that fit beside what is on the card now; one always may when nobody else does."""
        for one in new:
            if one.state != "compiled":
                continue
            others = [other for other in self._residents if other is not one]
            warming = [other for other in others if other.state == "warming"]
            limit = self._budget_bytes * (BESIDE_SHARE if warming else 1.0)
            if taken_bytes(others) + one.peak_bytes <= limit or not self._is_computing():
                for each in warming:
                    each.is_beside_others = True
                is_held = taken_bytes(others) > self._budget_bytes / 20
                one.is_beside_others = bool(warming) or is_held
                one.order("warming", order="go")

    def _is_computing(self) -> bool:
        return any(one.state in ("building", "warming") for one in self._residents)

    # ---- turns: one at a time ------------------------------------------------------------------

    def _rounds(self, group: list[Resident]) -> None:
        is_alone = len(group) == 1
        group = [one for one in group if not self._is_beaten(one)]
        for number in range(self._pace.rounds):
            for one in group:
                if one.state != "gone":
                    is_last = number == self._pace.rounds - 1  # a profiler may leave something behind
                    lead_steps = 0 if is_alone and number else 1
                    self._turn(one, "round", is_profiled=is_last, is_kept=is_alone, lead_steps=lead_steps)
        for one in group:
            if one.entry.times and one.state != "gone":
                self._turn(one, "times", times=one.entry.times, fewest_steps=2)

    def _is_beaten(self, one: Resident) -> bool:
        """Whether another setting of the peer was faster, by one window; the first setting cannot be."""
        rivals = self._rivals(one)
        if not rivals or one.timings:  # nobody to beat, or the best of a sweep already
            return False
        self._turn(one, "sweep")
        return one.state == "gone" or _seconds(one) > min(map(_seconds, rivals))

    def _rivals(self, one: Resident) -> list[Resident]:
        """Other settings of the peer that were timed."""
        same = [other for other in self._residents if _side(other) == _side(one)]
        return [other for other in same if other.entry.label != one.entry.label and other.timings]

    def _turn(self, one: Resident, kind: str, **changed: Any) -> None:
        """One window of one contender, while all others wait; after its last word it is told."""
        order: dict[str, Any] = {
            "seconds": self._pace.seconds,
            "fewest_steps": self._pace.fewest_steps,
            "lead_steps": 1,  # takes the memory again that went back to the card
            "times": 1,
            "is_profiled": False,
            "is_kept": False,
        }
        before = len(one.timings)
        one.order("timing", order="turn", **{**order, **changed})
        while one.state == "timing":
            self._listen()
        if len(one.timings) > before:
            one.timings[-1] |= {"kind": kind, "times": changed.get("times", 1)}
            self._tell(kind, one)

    # ---- messages ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take in what contenders say, or find those that have been silent for too long."""
        heard = self._selector.select(timeout=1.0)
        for key, _ in heard:
            one = key.fileobj
            assert isinstance(one, Resident)
            self._selector.unregister(one)
            one.hear()
            if one.state != "gone":
                self._selector.register(one, selectors.EVENT_READ)
            elif self._is_crowded(one):
                self._crowded.append(dataclasses.replace(one.entry, peak_bytes=self._budget_bytes))
            else:
                self._tell("error", one)
        limit = self._pace.timeout_seconds
        for one in self._residents:
            is_working = one.state in ("importing", "building", "warming", "timing")
            if is_working and time.monotonic() - one.since > limit:
                state = one.state
                self._end(one, f"{state} took more than {limit:.0f} s")
                self._tell("error", one)

    def _is_crowded(self, one: Resident) -> bool:
        """Whether it ran out of memory that others held, for the first time."""
        is_second = one.entry.peak_bytes >= self._budget_bytes
        is_out = "out of memory" in (one.error or "")
        # Those who only wait hold a context each, and some of them build at this moment.
        is_watched = any(other is not one and other.state not in ("new", "gone") for other in self._residents)
        return is_out and (one.is_beside_others or is_watched) and not is_second

    def _end(self, one: Resident, error: str | None = None) -> None:
        self._selector.unregister(one)
        one.end(error)


def _seconds(one: Resident) -> float:
    found = [timing["step_seconds"] for timing in one.timings if timing["times"] == 1]
    return min(found, default=float("inf"))


def _side(one: Resident) -> tuple[str, str]:
    return one.entry.case, one.entry.peer
