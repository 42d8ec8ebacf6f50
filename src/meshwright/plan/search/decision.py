"""The decision: the chosen layout and the alternatives to it."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import PlanError
from meshwright.plan.search.allow import NumericsChange
from meshwright.plan.search.candidate import Candidate
from meshwright.plan.search.choose_precision import ChosenPrecision
from meshwright.plan.search.question import Objective, Priced, Question
from meshwright.plan.search.search import TIE_FRACTION, SearchResult
from meshwright.plan.workload.layouts import CP_KINDS, FULL, OFFLOAD_BITS, Ints, Layouts
from meshwright.spec.check import check

NUM_PARETO = 24
NUM_SIMULATED = 8
"""The best layouts by closed form whose pipelines are simulated before one is chosen."""


@dataclass(frozen=True)
class Plan:
    """The decision and the layouts that it was compared with."""

    question: Question
    """The question with the chosen number formats and optimizer."""
    best: Candidate
    top: tuple[Candidate, ...]
    """The best layout of each mesh, the chosen one first."""
    pareto: tuple[Candidate, ...]
    """Layouts that no other beats in step time, memory and devices at once."""
    result: SearchResult
    search_seconds: float
    changes: tuple[NumericsChange, ...] = ()
    """Allowed changes of the numerics that the plan makes."""


def choose(chosen: ChosenPrecision, *, top: int, search_seconds: float) -> Plan:
    """The plan with the best of the layouts that fit; there is at least one."""
    question, fitting = chosen.question, chosen.result.fitting
    order = ranking(fitting, question.objective, chosen.best_score)
    rows = dict.fromkeys(
        [*map(int, order[:NUM_SIMULATED]), *_first_of_each_mesh(fitting.layouts, order, top)]
    )
    simulated = _ranked([Candidate(question, fitting.layouts.take([row])) for row in rows])
    best = next((candidate for candidate in simulated if not check(candidate.run)), None)
    if best is None:
        violation = check(simulated[0].run)[0]
        raise PlanError(f"the rules forbid the best layouts: {violation.fact}", hint=violation.hint)
    return Plan(
        question=question,
        best=best,
        top=tuple(_one_per_mesh([best, *simulated])[:top]),
        pareto=tuple(Candidate(question, fitting.layouts.take([row])) for row in pareto_rows(fitting)),
        result=chosen.result,
        search_seconds=search_seconds,
        changes=chosen.changes,
    )


def ranking(priced: Priced, objective: Objective, best: float = np.inf) -> NDArray[np.intp]:
    """Rows from best to worst; among equally good ones first the simplest (speed) or the fastest.

    `best` is the best score over everything that is allowed, where that is not among these rows.
    """
    score = priced.score(objective)
    close = score <= max(score.min(), min(score.min(), best) * (1.0 + TIE_FRACTION))
    tie = complexity(priced.layouts) if objective == "speed" else priced.step_seconds
    tie = np.where(close, tie, np.inf)
    return np.lexsort((priced.layouts.num_ranks, score, tie, ~close))


def complexity(layouts: Layouts) -> Ints:
    """How much a layout adds to plain data parallelism; among equally fast ones the lowest is chosen."""
    return (
        layouts.zero
        + 2 * ((layouts.dp_replicate > 1) & (layouts.dp_shard > 1))
        + 2 * (layouts.recompute > 0)
        + (layouts.recompute == FULL)
        + (layouts.recompute_every > 1)
        + 3 * (layouts.tp > 1)
        + 4 * (layouts.cp > 1)
        + (layouts.cp_kind == CP_KINDS.index("hierarchical"))
        + 5 * (layouts.pp > 1)
        + (layouts.virtual_stages > 1)
        + (layouts.ep > 1)
        + 6 * (layouts.offload > 0)
        + 2 * ((layouts.offload & OFFLOAD_BITS["parameters"]) > 0)
    ).astype(np.int64)


def pareto_rows(priced: Priced) -> list[int]:
    """Rows that no other beats in step time, memory and devices at once, from fast to slow."""
    axes = np.stack(
        [priced.step_seconds, priced.device_bytes, priced.layouts.num_ranks.astype(float)], axis=1
    )
    order = np.lexsort((axes[:, 2], axes[:, 1], axes[:, 0]))
    rows: list[int] = []
    for row in order:
        if not any(np.all(axes[other] <= axes[row] * 1.001) for other in rows):
            rows.append(int(row))
        if len(rows) >= NUM_PARETO:
            break
    return rows


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """From best to worst by simulated time, by the same rules as `ranking`."""
    names = [field.name for field in fields(Layouts)]
    columns = {name: np.concatenate([getattr(one.layout, name) for one in candidates]) for name in names}
    device_bytes = np.array([candidate.device_bytes for candidate in candidates])
    step_seconds = np.array([candidate.step_seconds for candidate in candidates])
    priced = Priced(Layouts(**columns), device_bytes, step_seconds)
    return [candidates[row] for row in ranking(priced, candidates[0].question.objective)]


def _one_per_mesh(candidates: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        seen.setdefault(tuple(int(column[0]) for column in _mesh_columns(candidate.layout)), candidate)
    return list(seen.values())


def _first_of_each_mesh(layouts: Layouts, order: NDArray[np.intp], count: int) -> list[int]:
    meshes = np.stack(_mesh_columns(layouts), axis=1)[order]
    _, first = np.unique(meshes, axis=0, return_index=True)
    return [int(order[position]) for position in np.sort(first)[:count]]


def _mesh_columns(layouts: Layouts) -> tuple[Ints, ...]:
    is_sharded = (layouts.zero > 0).astype(np.int64)
    return (
        *(layouts.dp_replicate, layouts.dp_shard, is_sharded),
        *(layouts.cp, layouts.tp, layouts.pp, layouts.ep),
    )
