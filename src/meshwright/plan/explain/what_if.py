"""One engine for every "what if": it prices a change of a question and returns what would come of it.

The views use it: `neighbours` (changes of the chosen layout), `gains` (changes of the numerics that are not
allowed), `fixes` (changes with which a run fits), `infeasible` (changes with which a question has a plan) and
`reasons` (the chosen layout without one of its techniques).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshwright.plan.search.candidate import Candidate
from meshwright.plan.search.meshes import Table
from meshwright.plan.search.question import Question
from meshwright.plan.search.search import search, search_meshes
from meshwright.plan.workload.layouts import Layouts
from meshwright.spec.check import check
from meshwright.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Change:
    """A question that differs from the user's, and which of its layouts to price."""

    text: str
    """The difference, such as `drop tp=8` or `memory.recompute=full`."""
    question: Question
    """The question after the change."""
    scope: Layouts | Table | range | None = None
    """One layout, all layouts on these meshes or with these world sizes; None: all layouts."""


@dataclass(frozen=True)
class Outcome:
    """The layout that a change leads to: the fastest that fits, else the one with the least memory."""

    change: Change
    candidate: Candidate | None
    """None where no layout satisfies the rules and the pins."""
    broken_rule: str = ""
    """The rule that forbids the layout."""
    closed_form_seconds: float = np.inf
    """The step time by which the search chose the layout, without simulating its pipeline."""

    @property
    def fits(self) -> bool:
        """Whether the change gives a layout that can run."""
        return self.candidate is not None and not self.broken_rule and self.candidate.fits

    @property
    def device_bytes(self) -> float:
        """Peak bytes per device; infinite without a layout."""
        return np.inf if self.candidate is None else self.candidate.device_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, even if the layout does not fit; infinite without a layout."""
        return np.inf if self.candidate is None else self.candidate.step_seconds

    @property
    def reason(self) -> str:
        """Why the change cannot be made; empty where it fits."""
        if self.broken_rule:
            return f"not allowed: {self.broken_rule}"
        if self.candidate is None:
            return "no layout satisfies the rules and the pins"
        if self.candidate.fits:
            return ""
        excess = self.candidate.excess_bytes
        if excess <= 0:
            return f"{show_bytes(self.candidate.host_bytes)} per rank do not fit in host memory"
        return f"does not fit: {show_bytes(self.device_bytes)}, {show_bytes(excess)} too much"

    @property
    def text(self) -> str:
        """`memory.recompute=full (61.2 GiB per device, 1.2 s per step)`, or the reason against it."""
        if self.candidate is None or not self.fits:
            return f"{self.change.text} ({self.reason})"
        offload = self.candidate.run.memory.offload
        host = f" with {' and '.join(offload)} on the host" if offload else ""
        need, seconds = show_bytes(self.device_bytes), show_seconds(self.step_seconds)
        return f"{self.change.text} ({need} per device, {seconds} per step{host})"


def what_if(change: Change) -> Outcome:
    """Price a change: its one layout, or the best layout that the search finds in its scope."""
    question, scope = change.question, change.scope
    if isinstance(scope, Layouts):
        candidate = Candidate(question, scope)
        violations = check(candidate.run)
        return Outcome(change, candidate, violations[0].fact if violations else "")
    found = search_meshes(question, scope) if isinstance(scope, dict) else search(question, ranks=scope)
    best = found.least_memory
    if len(found.fitting):
        best = found.fitting.take([int(found.fitting.step_seconds.argmin())])
    if best is None:
        return Outcome(change, None)
    candidate = Candidate(question, best.layouts)
    return Outcome(change, candidate, closed_form_seconds=float(best.step_seconds[0]))


def fitting(changes: Iterable[Change], *, limit: int | None = None) -> Iterator[Outcome]:
    """The outcomes that fit, in the order of the changes, at most `limit` of them."""
    return islice((outcome for outcome in map(what_if, changes) if outcome.fits), limit)


def with_columns(best: Candidate, text: str, **columns: int) -> Change:
    """The change of a layout to these values, everything else equal."""
    return Change(text, best.question, best.with_columns(**columns).layout)
