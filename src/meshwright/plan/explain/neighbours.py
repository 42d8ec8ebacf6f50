"""The neighbours of the chosen layout: one setting changed, and why it was not chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshwright.plan.explain.what_if import Change, what_if, with_columns
from meshwright.plan.search.candidate import RECOMPUTE_NAMES, Candidate
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.workload.layouts import OFFLOAD_BITS, RECOMPUTE_BITS
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.units import show_bytes, show_seconds

ITEM_NAMES = {
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "norms and activations",
    "recompute": "recomputing activations",
    "head": "the output head",
    "embedding": "the embedding",
    "tp": "tensor-parallel messages",
    "cp": "context-parallel messages",
    "ep": "dispatching tokens to experts",
    "fsdp": "gathering sharded weights",
    "host": "waiting for the host to launch kernels",
    "imbalance": "uneven pipeline stages",
    "bubble": "the pipeline bubble",
    "pp": "pipeline messages",
    "dp": "reducing gradients",
    "optimizer": "the optimizer",
    "offload": "host transfers",
}
"""What each item of a step's seconds is called in a sentence."""
Columns = dict[str, int]
"""Values of columns of `Layouts`."""
MIN_BYTES_SHOWN = 2**20


@dataclass(frozen=True)
class Neighbour:
    """One change of the chosen layout and the reason against it."""

    change: str
    reason: str
    device_bytes: float | None
    step_seconds: float | None


def neighbours(best: Candidate) -> list[Neighbour]:
    """Every change of one setting that the pins permit: those that fit first, from fast to slow."""
    now = {field.name: int(getattr(best.layout, field.name)[0]) for field in fields(best.layout)}
    changed: dict[str, Columns] = {}
    for text, columns in _changes(now, best):
        if best.question.pins.permits(**columns):
            changed.setdefault(text, columns)
    found = [_neighbour(best, with_columns(best, text, **columns)) for text, columns in changed.items()]
    return sorted(found, key=lambda each: (each.step_seconds is None, each.step_seconds or 0.0))


def _neighbour(best: Candidate, change: Change) -> Neighbour:
    outcome = what_if(change)
    if outcome.candidate is not None and outcome.fits:
        reason = _compared(best, outcome.candidate)
        return Neighbour(change.text, reason, outcome.device_bytes, outcome.step_seconds)
    return Neighbour(change.text, outcome.reason, None if outcome.broken_rule else outcome.device_bytes, None)


def _compared(best: Candidate, other: Candidate) -> str:
    """How much slower the other layout is, and which item grew most."""
    difference = other.step_seconds / best.step_seconds - 1.0
    saved = best.device_bytes - other.device_bytes
    memory = "as much memory"
    if abs(saved) >= MIN_BYTES_SHOWN:
        memory = f"saves {show_bytes(saved)} not needed" if saved > 0 else f"costs {show_bytes(-saved)} more"
    if difference < -TIE_FRACTION:
        why = "not proposed at this length, pin cp to use it" if other.run.parallel.cp > 1 else "not priced"
        return f"{-difference:.1%} faster by this estimate: {why}; {memory}"
    if difference < 0:
        return f"{-difference:.1%} faster, within {TIE_FRACTION:.0%}, and not as simple; {memory}"
    before, after = best.seconds_items, other.seconds_items
    growth = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*after, *before}}
    worst = max(growth, key=lambda name: growth[name])
    if growth[worst] <= 0 or difference < 0.001:
        return f"equally fast; {memory}"
    more = f"{show_seconds(growth[worst])} more for {ITEM_NAMES.get(worst, worst)}"
    return f"{difference:.1%} slower: {more}; {memory}"


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
        yield from _offloads(now["offload"])
    yield from _microbatches(now["microbatch_sequences"], now["num_microbatches"])
    if now["pp"] > 1:
        yield from _schedules(now["schedule"])


def _with_degree(now: Columns, axis: str, degree: int, best: Candidate) -> Columns | None:
    """One degree changed on as many devices; data parallelism takes up the difference."""
    if axis == "ep":
        return {"ep": degree} if best.question.run.model.moe is not None else None
    changed = {axis: degree}
    if axis == "cp":
        changed |= {"cp_kind": now["cp_kind"] if degree > 1 and now["cp"] > 1 else 0, "cp_inner": 1}
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


def _offloads(now: int) -> Iterator[tuple[str, Columns]]:
    """Nothing in host memory, or one thing more or less than now."""
    for bits in dict.fromkeys([0, *(now ^ bit for bit in OFFLOAD_BITS.values())]):
        if bits != now:
            yield f"offload={_offload_text(now)} -> {_offload_text(bits)}", {"offload": bits}


def _offload_text(bits: int) -> str:
    return "+".join(name for name, bit in OFFLOAD_BITS.items() if bits & bit) or "none"


def _microbatches(size: int, count: int) -> Iterator[tuple[str, Columns]]:
    sizes = [2 * size] * (count % 2 == 0) + [size // 2] * (size % 2 == 0)
    for new in sizes:
        columns = {"microbatch_sequences": new, "num_microbatches": size * count // new}
        yield f"microbatch_sequences={size} -> {new}", columns


def _schedules(now: int) -> Iterator[tuple[str, Columns]]:
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        index = SCHEDULES.index(schedule)
        if index != now:
            yield f"schedule={SCHEDULES[now]} -> {schedule}", {"schedule": index, "virtual_stages": chunks}
