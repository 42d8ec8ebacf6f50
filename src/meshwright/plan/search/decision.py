"""The decision: the chosen layout and the alternatives to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import PlanError
from meshwright.plan.search.allow import NumericsChange
from meshwright.plan.search.candidate import Candidate, candidates
from meshwright.plan.search.choose_precision import ChosenPrecision
from meshwright.plan.search.neighbours import neighbours_of, with_experts_on_ranks, without_axes
from meshwright.plan.search.question import Objective, Priced, Question
from meshwright.plan.search.search import TIE_FRACTION, SearchResult
from meshwright.plan.search.what_if import Outcome
from meshwright.plan.workload.layouts import CP_KINDS, FULL, OFFLOAD_BITS, Ints, Layouts, concatenated
from meshwright.spec.check import check, is_valid

NUM_PARETO = 24
EQUAL_FRACTION = 0.001
"""Layouts this close differ in nothing that a prediction can tell."""
NUM_SIMULATED = 16
"""The best layouts by closed form whose pipelines are simulated before one is chosen."""
MAX_ROUNDS = 8
"""How often the choice moves to a better neighbour."""


@dataclass(frozen=True)
class Plan:
    """The decision and the layouts that it was compared with."""

    question: Question
    """The question with the chosen number formats and optimizer."""
    best: Candidate
    top: tuple[Candidate, ...]
    """The chosen layout, then the best layouts of other meshes by the objective."""
    pareto: tuple[Candidate, ...]
    """Layouts that no other beats in step time, memory and devices at once."""
    result: SearchResult
    search_seconds: float
    neighbours: tuple[Outcome, ...] = ()
    """The chosen layout with one setting changed; none of them is better."""
    without: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    """The best layout without each axis that the chosen one uses; none of them is better."""
    with_ep: Outcome | None = None
    """For a routed model that is planned without ep: the best layout with it, which is not better."""
    changes: tuple[NumericsChange, ...] = ()
    """Allowed changes of the numerics that the plan makes."""


def choose(chosen: ChosenPrecision, *, top: int, search_seconds: float) -> Plan:
    """The plan with the best of the layouts that fit; there is at least one."""
    question, fitting = chosen.question, chosen.result.fitting
    pool = candidates(question, fitting.layouts.take(_rows_to_simulate(chosen)))
    best, near, without = _settled(pool, fitting)
    with_ep = with_experts_on_ranks(best, pool, fitting)
    return Plan(
        question=question,
        best=best,
        top=tuple(_table(best, pool)[:top]),
        pareto=tuple(candidates(question, fitting.layouts.take(pareto_rows(fitting)))),
        result=chosen.result,
        search_seconds=search_seconds,
        neighbours=tuple(near),
        without=without,
        with_ep=with_ep,
        changes=chosen.changes,
    )


def _rows_to_simulate(chosen: ChosenPrecision) -> list[int]:
    """The best by ranking and by score, also on fewer devices, and the best of each mesh."""
    fitting, question = chosen.result.fitting, chosen.question
    devices = question.cluster.num_devices
    order = ranking(fitting, question.objective, chosen.best_score, devices=devices)
    by_score = np.argsort(fitting.score(question.objective), kind="stable")
    fewer = by_score[fitting.layouts.num_ranks[by_score] < devices]
    meshes = _first_of_each_mesh(fitting.layouts, order, NUM_SIMULATED)
    first = [order[:NUM_SIMULATED], by_score[:NUM_SIMULATED], fewer[:NUM_SIMULATED]]
    return list(dict.fromkeys([*(int(row) for part in first for row in part), *meshes]))


def _settled(pool: list[Candidate], fitting: Priced) -> tuple[Candidate, list[Outcome], dict[str, Outcome]]:
    """The best candidate, its neighbours, and the best without its axes; better ones join the pool."""
    best = _best_allowed(pool)
    near, without = neighbours_of(best), {}
    for _ in range(MAX_ROUNDS):
        better = _better(best, near)
        if not better:
            without = without_axes(best, pool, fitting)
            with_ep = with_experts_on_ranks(best, pool, fitting)
            better = _better(best, [*without.values(), *([with_ep] if with_ep else [])])
        if not better:
            break
        pool.extend(better)
        best = _best_allowed(pool)
        near = neighbours_of(best)
    else:  # the last round found a better one, too
        without = without_axes(best, pool, fitting)
    return best, near, without


def _better(best: Candidate, outcomes: list[Outcome]) -> list[Candidate]:
    """The candidates that win by more than the margin, or that are faster and not more complex."""
    return [
        outcome.candidate
        for outcome in outcomes
        if outcome.candidate is not None and outcome.fits and _is_better(outcome.candidate, best)
    ]


def _is_better(candidate: Candidate, best: Candidate) -> bool:
    if candidate.score * (1.0 + TIE_FRACTION) < best.score:
        return True
    is_as_simple = complexity(candidate.layout)[0] <= complexity(best.layout)[0]
    return is_as_simple and candidate.score < best.score * (1.0 - EQUAL_FRACTION)


def _best_allowed(pool: list[Candidate]) -> Candidate:
    ranked = _ranked(pool)
    best = next((candidate for candidate in ranked if is_valid(candidate.run)), None)
    if best is None:
        violation = check(ranked[0].run)[0]
        raise PlanError(f"the rules forbid the best layouts: {violation.fact}", hint=violation.hint)
    return best


def ranking(
    priced: Priced, objective: Objective, best: float = np.inf, *, devices: int | None = None
) -> NDArray[np.intp]:
    """Rows from best to worst; among equally good ones first the simplest (speed) or the fastest.

    `best` is the best score over everything that is allowed, where that is not among these rows. With
    `devices`, a row is only equally good if it beats the best on fewer devices: more are never slower.
    """
    score = priced.score(objective)
    limit = min(score.min(), best) * (1.0 + TIE_FRACTION)
    fewer = priced.layouts.num_ranks < (devices or 0)
    if objective == "speed" and fewer.any():
        limit = min(limit, float(score[fewer].min()))
    close = score <= max(score.min(), limit)
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
        + (layouts.ep_overlap > 0)
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


def _ranked(pool: list[Candidate]) -> list[Candidate]:
    """From best to worst by simulated time, by the same rules as `ranking`."""
    question = pool[0].question
    step_seconds = np.array([candidate.step_seconds for candidate in pool])
    # Only the objective that they decide needs the bytes.
    by_memory = question.objective == "memory"
    device_bytes = np.array([one.device_bytes for one in pool]) if by_memory else step_seconds
    priced = Priced(concatenated([one.layout for one in pool]), device_bytes, step_seconds)
    order = ranking(priced, question.objective, devices=question.cluster.num_devices)
    return [pool[row] for row in order]


def _table(best: Candidate, pool: list[Candidate]) -> list[Candidate]:
    """The chosen layout, then the best one of each other mesh, the best first."""
    first, *others = _one_per_mesh([best, *_ranked(pool)])
    return [first, *sorted(others, key=lambda candidate: candidate.score)]


def _one_per_mesh(pool: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in pool:
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
