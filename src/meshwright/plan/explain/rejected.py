"""The neighbours of a chosen layout, each with the reason why it was not chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshwright.plan.search.decision import RECOMPUTE_NAMES, Candidate
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.workload.layouts import OFFLOAD_BITS, RECOMPUTE_BITS, Layouts, layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.spec.check import check
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
Row = dict[str, int]
SMALLEST_BYTES_TOLD = 2**20


@dataclass(frozen=True)
class Rejected:
    """One change to the chosen layout and what speaks against it."""

    change: str
    reason: str
    device_bytes: float | None
    step_seconds: float | None


def rejected(best: Candidate) -> list[Rejected]:
    """Every single-step change that the pins permit: first those that fit, from fast to slow."""
    found: dict[str, Rejected] = {}
    for change, row in _neighbours(_row(best.at), best):
        if best.question.pins.permits(**row):
            judged = _judge(best, change, row)
            found.setdefault(change, judged)
    return sorted(found.values(), key=lambda each: (each.step_seconds is None, each.step_seconds or 0.0))


def _row(at: Layouts) -> Row:
    return {f.name: int(getattr(at, f.name)[0]) for f in fields(at)}


def _neighbours(row: Row, best: Candidate) -> Iterator[tuple[str, Row]]:
    for axis in ("tp", "cp", "pp", "ep"):
        for degree in (row[axis] // 2, row[axis] * 2):
            changed = _with_degree(row, axis, degree, best) if degree >= 1 else None
            if changed is not None:
                yield f"{axis}={row[axis]} -> {degree}", changed
    yield from _shardings(row)
    for word, bits in RECOMPUTE_BITS.items():
        if bits != row["recompute"]:
            name = RECOMPUTE_NAMES[row["recompute"]]
            yield f"recompute={name} -> {word}", {**row, "recompute": bits, "recompute_every": 1}
    if best.question.may_offload:
        yield from _offloads(row)
    yield from _microbatches(row)
    yield from _pipelines(row)


def _with_degree(row: Row, axis: str, degree: int, best: Candidate) -> Row | None:
    """The same number of devices with one axis changed and data parallelism taking up the difference."""
    changed = {**row, axis: degree}
    if axis == "ep":
        return changed if best.question.run.model.moe is not None else None
    if axis == "cp":
        changed |= {"cp_kind": row["cp_kind"] if degree > 1 and row["cp"] > 1 else 0, "cp_inner": 1}
    if axis == "pp" and degree == 1:
        changed |= {"schedule": SCHEDULES.index("1f1b"), "virtual_stages": 1}
    dp, left = divmod(best.num_ranks, changed["tp"] * changed["cp"] * changed["pp"])
    per_rank, uneven = divmod(best.question.run.data.batch_sequences, dp * row["microbatch_sequences"] or 1)
    if left or uneven or not per_rank:
        return None
    replicate = dp if row["dp_shard"] == 1 else row["dp_replicate"] if dp % row["dp_replicate"] == 0 else 1
    changed |= {"dp_replicate": replicate, "dp_shard": dp // replicate, "num_microbatches": per_rank}
    if changed["dp_shard"] * changed["cp"] == 1:
        changed["zero"] = 0
    return changed


def _shardings(row: Row) -> Iterator[tuple[str, Row]]:
    dp = row["dp_replicate"] * row["dp_shard"]
    for zero in (row["zero"] - 1, row["zero"] + 1):
        if 0 <= zero <= 3 and dp * row["cp"] > 1:
            shard = 1 if zero == 0 else row["dp_shard"] if row["dp_shard"] > 1 else dp
            changed = {**row, "zero": zero, "dp_shard": shard, "dp_replicate": dp // shard}
            yield f"zero={row['zero']} -> {zero}", changed


def _offloads(row: Row) -> Iterator[tuple[str, Row]]:
    """Nothing on the host, or one thing more or less."""
    now = row["offload"]
    for bits in dict.fromkeys([0, *(now ^ bit for bit in OFFLOAD_BITS.values())]):
        if bits != now:
            yield f"offload={_offload_words(now)} -> {_offload_words(bits)}", {**row, "offload": bits}


def _offload_words(bits: int) -> str:
    return "+".join(word for word, bit in OFFLOAD_BITS.items() if bits & bit) or "none"


def _microbatches(row: Row) -> Iterator[tuple[str, Row]]:
    size, count = row["microbatch_sequences"], row["num_microbatches"]
    if count % 2 == 0:
        changed = {**row, "microbatch_sequences": 2 * size, "num_microbatches": count // 2}
        yield f"microbatch_sequences={size} -> {2 * size}", changed
    if size % 2 == 0:
        changed = {**row, "microbatch_sequences": size // 2, "num_microbatches": 2 * count}
        yield f"microbatch_sequences={size} -> {size // 2}", changed


def _pipelines(row: Row) -> Iterator[tuple[str, Row]]:
    if row["pp"] == 1:
        return
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        index = SCHEDULES.index(schedule)
        if index != row["schedule"]:
            changed = {**row, "schedule": index, "virtual_stages": chunks}
            yield f"schedule={SCHEDULES[row['schedule']]} -> {schedule}", changed


def _judge(best: Candidate, change: str, row: Row) -> Rejected:
    candidate = Candidate(best.question, layouts(**row))
    violations = check(candidate.run)
    if violations:
        return Rejected(change, f"not allowed: {violations[0].fact}", None, None)
    if not candidate.fits:
        need, over = candidate.device_bytes, candidate.device_bytes - best.question.memory_budget_bytes
        if over <= 0:
            host = sum(candidate.host_items[candidate.peak_stage].values())
            return Rejected(change, f"{show_bytes(host)} per rank do not fit in host memory", need, None)
        reason = f"does not fit: {show_bytes(need)}, {show_bytes(over)} too much"
        return Rejected(change, reason, need, None)
    return Rejected(change, _slower(best, candidate), candidate.device_bytes, candidate.step_seconds)


def _slower(best: Candidate, candidate: Candidate) -> str:
    """How much slower, and which item grew most."""
    difference = candidate.step_seconds / best.step_seconds - 1.0
    saved = best.device_bytes - candidate.device_bytes
    memory = "as much memory"
    if abs(saved) >= SMALLEST_BYTES_TOLD:
        memory = f"saves {show_bytes(saved)} not needed" if saved > 0 else f"costs {show_bytes(-saved)} more"
    if difference < -TIE_FRACTION:
        pin = (
            "not proposed at this length, pin cp to take it"
            if candidate.run.parallel.cp > 1
            else "not priced"
        )
        return f"{-difference:.1%} faster by this estimate: {pin}; {memory}"
    if difference < 0:
        return f"{-difference:.1%} faster, within {TIE_FRACTION:.0%}, and not as simple; {memory}"
    names = {*candidate.seconds_items, *best.seconds_items}
    growth = {
        name: candidate.seconds_items.get(name, 0.0) - best.seconds_items.get(name, 0.0) for name in names
    }
    worst = max(growth, key=lambda name: growth[name])
    if growth[worst] <= 0 or difference < 0.001:
        return f"equally fast; {memory}"
    more = f"{show_seconds(growth[worst])} more for {ITEM_NAMES.get(worst, worst)}"
    return f"{difference:.1%} slower: {more}; {memory}"
