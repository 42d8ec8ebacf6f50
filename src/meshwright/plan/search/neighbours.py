"""The neighbours of a layout: one setting changed, everything else equal, with what that would take.

The plan asks them whether one is better before it is final, and shows them with the reason against them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.search.candidate import RECOMPUTE_NAMES, Candidate, candidates
from meshwright.plan.search.question import Priced, Question
from meshwright.plan.search.what_if import NUM_SIMULATED, Change, Outcome, changed_layouts, what_if
from meshwright.plan.workload.layouts import OFFLOAD_BITS, RECOMPUTE_BITS
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.spec.check import is_valid

Columns = dict[str, int]
"""Values of columns of `Layouts`."""
AXES = ("tp", "pp", "cp", "ep")


def neighbours_of(best: Candidate) -> list[Outcome]:
    """Every change of one setting that the pins permit, priced."""
    now = {field.name: int(getattr(best.layout, field.name)[0]) for field in fields(best.layout)}
    changed: dict[str, Columns] = {}
    for text, columns in _changes(now, best):
        if best.question.pins.permits(**columns):
            changed.setdefault(text, columns)
    return changed_layouts(best, changed)


def without_axes(best: Candidate, pool: Sequence[Candidate], fitting: Priced) -> dict[str, Outcome]:
    """The best layout without each axis that a layout uses and no pin sets.

    `fitting` was kept by the search, and `pool` are those of it whose pipelines were simulated.
    """
    axes = [axis for axis in AXES if getattr(best.run.parallel, axis) > 1]
    return {
        axis: _without(best, axis, pool, fitting) for axis in axes if axis not in best.question.pins.allowed
    }


def question_without(question: Question, axis: str) -> Question:
    """The question with one axis pinned to 1."""
    pins = question.pins
    return replace(question, pins=replace(pins, allowed={**pins.allowed, axis: (1,)}))


def with_experts_on_ranks(best: Candidate, pool: Sequence[Candidate], fitting: Priced) -> Outcome | None:
    """The best kept layout with ep, for a routed model on several ranks without; None where none was kept."""
    is_open = best.run.model.moe is not None and best.num_ranks > 1 and best.run.parallel.ep == 1
    rows = np.flatnonzero(fitting.layouts.ep > 1)
    if not is_open or "ep" in best.question.pins.allowed or len(rows) == 0:
        return None
    simulated = [one for one in pool if one.run.parallel.ep > 1]
    return Outcome(Change("ep>1", best.question), _best_of(simulated, fitting, rows, best.question))


def _without(best: Candidate, axis: str, pool: Sequence[Candidate], fitting: Priced) -> Outcome:
    """The best of the kept layouts, or of a new search where none was kept."""
    change = Change(f"{axis}=1", question_without(best.question, axis))
    rows = np.flatnonzero(getattr(fitting.layouts, axis) == 1)
    if len(rows) == 0:
        return what_if(change)
    simulated = [one for one in pool if getattr(one.run.parallel, axis) == 1]
    return Outcome(change, _best_of(simulated, fitting, rows, best.question))


def _best_of(
    simulated: Sequence[Candidate], fitting: Priced, rows: NDArray[np.intp], question: Question
) -> Candidate:
    """The best of the candidates that were simulated and of the best of these rows."""
    order = rows[np.argsort(fitting.score(question.objective)[rows], kind="stable")]
    found = candidates(question, fitting.layouts.take(order[:NUM_SIMULATED]))
    allowed = [one for one in (*simulated, *found) if is_valid(one.run)]
    return min(allowed or found, key=lambda candidate: candidate.score)


def _changes(now: Columns, best: Candidate) -> Iterator[tuple[str, Columns]]:
    for axis in ("tp", "cp", "pp", "ep"):
        for degree in (now[axis] // 2, now[axis] * 2):
            columns = _with_degree(now, axis, degree, best) if degree >= 1 else None
            if columns is not None:
                yield f"{axis}={now[axis]} -> {degree}", columns
    yield from _zero_stages(now)
    for name, bits in RECOMPUTE_BITS.items():
        if bits != now["recompute"]:
            text = f"recompute={RECOMPUTE_NAMES[now['recompute']]} -> {name}"
            yield text, {"recompute": bits, "recompute_every": 1}
    if best.question.may_offload:
        # Of a run with adapters the search moves activations and a frozen embedding alone.
        is_full = best.run.adapter is None
        names = ("optimizer", "parameters", "activations") if is_full else ("activations", "embedding")
        yield from _offloads(now["offload"], [OFFLOAD_BITS[name] for name in names])
    yield from _microbatches(now["microbatch_sequences"], now["num_microbatches"])
    if now["pp"] > 1:
        yield from _schedules(now["schedule"])


def _with_degree(now: Columns, axis: str, degree: int, best: Candidate) -> Columns | None:
    """One degree changed on as many devices; data parallelism takes up the difference."""
    if axis == "ep":
        moe, overlap = best.question.run.model.moe, {"ep_overlap": 0} if degree == 1 else {}
        return {"ep": degree, **overlap} if moe is not None and moe.num_experts % degree == 0 else None
    changed = {axis: degree}
    if axis == "cp":
        kept = {name: now[name] for name in ("cp_kind", "cp_stripes") if degree > 1 and now["cp"] > 1}
        changed |= {"cp_kind": 0, "cp_inner": 1, "cp_stripes": 1, **kept}
    if axis == "pp" and degree == 1:
        changed |= {"schedule": SCHEDULES.index("1f1b"), "virtual_stages": 1}
    degrees = {**now, **changed}
    dp, left = divmod(best.num_ranks, degrees["tp"] * degrees["cp"] * degrees["pp"])
    per_rank, uneven = divmod(best.question.run.data.batch_sequences, dp * now["microbatch_sequences"] or 1)
    if left or uneven or not per_rank:
        return None
    replicate = dp if now["dp_shard"] == 1 else now["dp_replicate"] if dp % now["dp_replicate"] == 0 else 1
    changed |= {"dp_replicate": replicate, "dp_shard": dp // replicate, "num_microbatches": per_rank}
    return changed if changed["dp_shard"] * degrees["cp"] > 1 else {**changed, "zero": 0}


def _zero_stages(now: Columns) -> Iterator[tuple[str, Columns]]:
    dp = now["dp_replicate"] * now["dp_shard"]
    for zero in (now["zero"] - 1, now["zero"] + 1):
        if 0 <= zero <= 3 and dp * now["cp"] > 1:
            shard = 1 if zero == 0 else now["dp_shard"] if now["dp_shard"] > 1 else dp
            columns = {"zero": zero, "dp_shard": shard, "dp_replicate": dp // shard}
            yield f"zero={now['zero']} -> {zero}", columns


def _offloads(now: int, movable: list[int]) -> Iterator[tuple[str, Columns]]:
    """Nothing in host memory, or one of what is movable more or less than now."""
    for bits in dict.fromkeys([0, *(now ^ bit for bit in movable)]):
        if bits != now:
            yield f"offload={_offload_text(now)} -> {_offload_text(bits)}", {"offload": bits}


def _offload_text(bits: int) -> str:
    return "+".join(name for name, bit in OFFLOAD_BITS.items() if bits & bit) or "none"


def _microbatches(size: int, count: int) -> Iterator[tuple[str, Columns]]:
    sizes = [2 * size] * (count % 2 == 0) + [size // 2] * (size % 2 == 0)
    for new in sizes:
        columns = {"microbatch_sequences": new, "num_microbatches": size * count // new}
        yield f"micro={size}x{count} -> {new}x{size * count // new}", columns


def _schedules(now: int) -> Iterator[tuple[str, Columns]]:
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        index = SCHEDULES.index(schedule)
        if index != now:
            yield f"schedule={SCHEDULES[now]} -> {schedule}", {"schedule": index, "virtual_stages": chunks}
