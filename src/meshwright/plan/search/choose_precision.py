"""In which of the allowed formats a run is planned: the least change that is as good as the best of all.

The corners of what is allowed are searched whole. What lies between them is priced on the layouts that the
corners kept, which decides whether less of a change would do; what is chosen is then searched whole too.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshwright.plan.search.allow import NumericsChange, Variant, corners, variants
from meshwright.plan.search.question import Priced, Question, fitting_rows, price
from meshwright.plan.search.search import TIE_FRACTION, SearchResult, concatenate, search
from meshwright.plan.workload.layouts import Layouts

MAX_ROWS_BETWEEN = 4000
"""Of each corner, the best of its layouts on which the variants between are priced."""


@dataclass(frozen=True)
class ChosenPrecision:
    """The formats that were settled on, and what was found in them."""

    question: Question
    found: SearchResult
    changes: tuple[NumericsChange, ...] = ()
    best_score: float = np.inf
    """Of the objective, over everything that is allowed."""


def with_run(question: Question, variant: Variant) -> Question:
    """The question about this variant, nothing else allowed."""
    return replace(question, run=variant.run)


def allowed_variants(question: Question) -> list[Variant]:
    """The run as asked, and in every combination that is allowed."""
    return variants(question.run, question.allow, question.pins.overrides, question.cluster.device)


def corner_questions(question: Question) -> list[Question]:
    """What has to be searched to know the best that the allowed formats can give."""
    return [with_run(question, each) for each in corners(allowed_variants(question))]


def choose_precision(question: Question) -> ChosenPrecision:
    """Search what is allowed; where nothing fits, what was found in the formats that come closest."""
    listed = allowed_variants(question)
    searched = {id(each): search(with_run(question, each)) for each in corners(listed)}
    scores = [_score(found, question) for found in searched.values()]
    best = min(scores)
    if not np.isfinite(best):
        return _closest(question, listed, searched)
    rows = _kept_rows(question, list(searched.values()))
    limit = best * (1.0 + TIE_FRACTION)
    chosen = next(each for each in listed if _reaches(question, each, searched.get(id(each)), rows) <= limit)
    asked = with_run(question, chosen)
    found = searched.get(id(chosen)) or search(asked)
    return ChosenPrecision(asked, found, chosen.changes, best)


def _score(found: SearchResult, question: Question) -> float:
    fitting = found.fitting
    return float(fitting.score(question.objective).min()) if len(fitting) else np.inf


def _kept_rows(question: Question, found: list[SearchResult]) -> Layouts:
    """The best layouts of every corner."""
    parts = [each.fitting for each in found if len(each.fitting)]
    best = [
        part.take(np.argsort(part.score(question.objective), kind="stable")[:MAX_ROWS_BETWEEN])
        for part in parts
    ]
    return concatenate(best).layouts


def _reaches(question: Question, variant: Variant, found: SearchResult | None, rows: Layouts) -> float:
    """The best score of a variant: as searched, or of the layouts at hand."""
    if found is not None:
        return _score(found, question)
    asked = with_run(question, variant)
    priced: Priced = price(asked, rows)
    fits = fitting_rows(asked, rows)
    return float(priced.score(question.objective)[fits].min()) if fits.any() else np.inf


def _closest(question: Question, listed: list[Variant], searched: dict[int, SearchResult]) -> ChosenPrecision:
    """Nothing fits: the variant whose least_memory layout needs least."""

    def need(variant: Variant) -> float:
        least_memory = searched[id(variant)].least_memory
        return float(least_memory.device_bytes[0]) if least_memory is not None else np.inf

    closest = min((each for each in listed if id(each) in searched), key=need)
    return ChosenPrecision(with_run(question, closest), searched[id(closest)], closest.changes)
