"""Chooses number formats and optimizer among the allowed ones: the least change that is as good as any.

The corners of what is allowed are searched in full. The variants between them are priced on the best layouts
of the corners, which shows whether less of a change is enough. The chosen variant is then searched in full.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.plan.search.allow import NumericsChange, Variant, corners, variants
from meshwright.plan.search.collector import concatenate
from meshwright.plan.search.question import Question, distance, fitting_rows, price, price_memory
from meshwright.plan.search.search import TIE_FRACTION, SearchResult, search
from meshwright.plan.workload.layouts import Layouts

MAX_CORNER_ROWS = 4000
"""How many of the best layouts of each corner the variants between are priced on."""


@dataclass(frozen=True)
class ChosenPrecision:
    """The chosen number formats and optimizer, and the result of the search with them."""

    question: Question
    result: SearchResult
    changes: tuple[NumericsChange, ...] = ()
    best_score: float = np.inf
    """The best score of the objective over everything that is allowed."""


def corner_questions(question: Question) -> list[Question]:
    """The questions whose searches find the best that the allowed changes can give."""
    return [corner.question for corner in corners(variants(question))]


def choose_precision(question: Question) -> ChosenPrecision:
    """Search what is allowed; where nothing fits, the variant that comes closest."""
    listed = variants(question)
    searched = {id(corner): search(corner.question) for corner in corners(listed)}
    best = min(_score(result, question) for result in searched.values())
    if not np.isfinite(best):
        return _closest(listed, searched)
    layouts = _best_layouts(question, list(searched.values()))
    limit = best * (1.0 + TIE_FRACTION)
    chosen = next(each for each in listed if _best_score(each, searched.get(id(each)), layouts) <= limit)
    result = searched.get(id(chosen)) or search(chosen.question)
    return ChosenPrecision(chosen.question, result, chosen.changes, best)


def _score(result: SearchResult, question: Question) -> float:
    fitting = result.fitting
    return float(fitting.score(question.objective).min()) if len(fitting) else np.inf


def _best_layouts(question: Question, results: list[SearchResult]) -> Layouts:
    """The best layouts of every corner."""
    best = [
        part.take(np.argsort(part.score(question.objective), kind="stable")[:MAX_CORNER_ROWS])
        for part in (result.fitting for result in results)
        if len(part)
    ]
    return concatenate(best).layouts


def _best_score(variant: Variant, result: SearchResult | None, layouts: Layouts) -> float:
    """The best score of a variant: from its search, or else on these layouts."""
    question = variant.question
    if result is not None:
        return _score(result, question)
    score = price(question, layouts).score(question.objective)
    fits = fitting_rows(question, price_memory(question, layouts))
    return float(score[fits].min()) if fits.any() else np.inf


def _closest(listed: list[Variant], searched: dict[int, SearchResult]) -> ChosenPrecision:
    """The variant whose layouts come closest, where nothing fits."""

    def far(variant: Variant) -> float:
        closest = searched[id(variant)].closest
        if closest is None:
            return np.inf
        needed = price_memory(variant.question, closest.layouts)
        return float(distance(variant.question, needed)[0])

    best = min((each for each in listed if id(each) in searched), key=far)
    return ChosenPrecision(best.question, searched[id(best)], best.changes)
