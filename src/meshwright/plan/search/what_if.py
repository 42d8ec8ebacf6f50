"""One engine for every "what if": it prices a change of a question and returns what would come of it.

The views use it: `neighbours` (changes of the chosen layout), `gains` (changes of the numerics that are not
allowed), `fixes` (changes with which a run fits), `infeasible` (changes with which a question has a plan) and
`reasons` (the chosen layout without one of its techniques).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshwright.plan.search.candidate import Candidate, candidates
from meshwright.plan.search.meshes import Table
from meshwright.plan.search.question import Question
from meshwright.plan.search.search import NEAR_BEST, SearchResult, search, search_meshes
from meshwright.plan.workload.layouts import Layouts, concatenated
from meshwright.spec.check import check
from meshwright.units import show_bytes, show_seconds

NUM_SIMULATED = 3
"""The best layouts by closed form of which the best is the answer."""


@dataclass(frozen=True)
class Change:
    """A question that differs from the user's, and which of its layouts to price."""

    text: str
    """The difference, such as `drop tp=8` or `memory.recompute=full`."""
    question: Question
    """The question after the change."""
    scope: Layouts | Table | range | None = None
    """One layout, all layouts on these meshes or with these world sizes; None: all layouts."""
    below: float = np.inf
    """On given meshes: layouts with a higher score do not matter."""


@dataclass(frozen=True)
class Outcome:
    """The layout that a change leads to: the best that fits, else the one that comes closest."""

    change: Change
    candidate: Candidate | None
    """None where no layout satisfies the rules and the pins."""
    broken_rule: str = ""
    """The rule that forbids the layout."""

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
        return f"does not fit: {self.candidate.over_limit_text}"

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
        return _outcome(change, Candidate(question, scope))
    if isinstance(scope, dict):
        found = search_meshes(question, scope, below=change.below)
    else:
        found = search(question, ranks=scope, within=NEAR_BEST)
    return Outcome(change, best_candidate(question, found))


def _outcome(change: Change, candidate: Candidate) -> Outcome:
    violations = check(candidate.run)
    return Outcome(change, candidate, violations[0].fact if violations else "")


def changed_layouts(best: Candidate, changed: Mapping[str, Mapping[str, int]]) -> list[Outcome]:
    """What becomes of a layout with the values of each change, priced together; the keys name the changes."""
    if not changed:
        return []
    layouts = concatenated([best.with_columns(**columns).layout for columns in changed.values()])
    found = candidates(best.question, layouts, with_memory=True)
    pairs = zip(changed, found, strict=True)
    return [_outcome(Change(text, best.question, one.layout), one) for text, one in pairs]


def best_candidate(question: Question, found: SearchResult) -> Candidate | None:
    """The best of the kept layouts, its pipeline simulated; where none fits, the one that comes closest."""
    fitting = found.fitting
    if len(fitting) == 0:
        return None if found.closest is None else Candidate(question, found.closest.layouts)
    rows = np.argsort(fitting.score(question.objective), kind="stable")[:NUM_SIMULATED]
    return min(candidates(question, fitting.layouts.take(rows)), key=lambda candidate: candidate.score)


def fitting(changes: Iterable[Change], *, limit: int | None = None) -> Iterator[Outcome]:
    """The outcomes that fit, in the order of the changes, at most `limit` of them."""
    return islice((outcome for outcome in map(what_if, changes) if outcome.fits), limit)


def with_columns(best: Candidate, text: str, **columns: int) -> Change:
    """The change of a layout to these values, everything else equal."""
    return Change(text, best.question, best.with_columns(**columns).layout)
