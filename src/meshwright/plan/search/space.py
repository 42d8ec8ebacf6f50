"""Every layout worth pricing, as arrays.

Which degrees a model allows is asked of the rules (`spec/check`), never repeated here. What is left out
is dominated: gpipe and looped_bfs hold more than 1f1b and interleaved_1f1b at the same bubble, so they
are priced where those cannot run, or when they are pinned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.search.pins import Pins
from meshwright.plan.workload.layouts import (
    CP_KINDS,
    FULL,
    OFFLOAD_BITS,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    Ints,
    Layouts,
    offload_bits,
)
from meshwright.plan.workload.schedules import SCHEDULES, SPLIT_BACKWARD, PipelineShape, problem
from meshwright.spec.check import check
from meshwright.spec.parallel import ParallelSpec, Schedule
from meshwright.spec.run import RunSpec

MIN_CP_POSITIONS = 8192
"""Context parallel is for long context: it is proposed while each rank keeps this many positions."""
MIN_CP_POSITIONS_IF_NEEDED = 1024
"""... or this many, where nothing fits without it."""
MAX_CP, MAX_PP, MAX_EP, MAX_VIRTUAL_STAGES = 64, 64, 64, 8
MAX_MICROBATCH_TOKENS = 131072
RECOMPUTE_CHOICES = (
    (RECOMPUTE_NONE, 1),
    (RECOMPUTE_SELECTIVE, 1),
    (RECOMPUTE_SELECTIVE, 2),
    (FULL, 1),
    (FULL, 2),
    (FULL, 4),
)
Table = dict[str, Ints]


@dataclass(frozen=True)
class Space:
    """What bounds the search: a run whose layout is open, the cluster, and the user's pins."""

    run: RunSpec
    cluster: Cluster
    pins: Pins
    min_cp_positions: int = MIN_CP_POSITIONS
    """Positions of a sequence that a rank of cp keeps at least."""
    offloads: bool = False
    """Something lives in host memory: every sensible candidate of what, where the run does not say it."""

    @property
    def batch_sequences(self) -> int:
        """Global batch."""
        return self.run.data.batch_sequences


@dataclass(frozen=True)
class ModelSharding:
    """How the model itself is cut, apart from data and pipeline."""

    tp: int
    cp: int
    cp_kind: int
    cp_inner: int
    ep: int
    etp: int


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _expert_cuts(num_experts: int) -> list[int]:
    """Ways to deal out experts: powers of two up to MAX_EP, and one expert per rank."""
    return [
        d for d in divisors(num_experts) if (d & (d - 1) == 0 and d <= MAX_EP) or d == num_experts <= MAX_EP
    ]


def model_shardings(space: Space) -> list[ModelSharding]:
    """Every admissible cut of the model: the rules decide."""
    found = [cut for cut in _proposed_cuts(space) if not sharding_violations(space.run, cut)]
    return [cut for cut in found if space.pins.permits(**{f.name: getattr(cut, f.name) for f in fields(cut)})]


def _proposed_cuts(space: Space) -> list[ModelSharding]:
    model, pins = space.run.model, space.pins
    heads = gcd(model.attention.num_heads, model.attention.num_kv_heads)
    tps = pins.keep("tp", [d for d in divisors(heads) if d <= space.cluster.devices_per_node])
    longest = min(MAX_CP, max(1, space.run.data.sequence_length // space.min_cp_positions))
    cps = pins.keep("cp", [2**k for k in range(longest.bit_length())])
    eps = pins.keep("ep", _expert_cuts(model.moe.num_experts) if model.moe else [1])
    return [
        ModelSharding(tp, cp, kind, inner, ep, etp)
        for tp, cp, ep in product(tps, cps, eps)
        for kind, inner in _cp_kinds(cp, pins)
        for etp in pins.keep("etp", [1])
    ]


def _cp_kinds(cp: int, pins: Pins) -> list[tuple[int, int]]:
    if cp == 1:
        return [(0, 1)]
    kinds = pins.keep("cp_kind", range(len(CP_KINDS)))
    inner = pins.keep("cp_inner", [d for d in divisors(cp) if 1 < d < cp])
    hierarchical = CP_KINDS.index("hierarchical")
    return [(kind, size) for kind in kinds for size in (inner if kind == hierarchical else [1])]


def sharding_violations(run: RunSpec, cut: ModelSharding) -> list[str]:
    """What the rules say against a cut on a mesh that is otherwise as small as it can be."""
    dp_shard = cut.ep // gcd(cut.ep, cut.cp)
    parallel = ParallelSpec(
        dp_shard=dp_shard,
        zero=_max_zero(run) if dp_shard * cut.cp > 1 else 0,
        cp=cut.cp,
        cp_kind=CP_KINDS[cut.cp_kind],
        cp_inner=cut.cp_inner,
        tp=cut.tp,
        ep=cut.ep,
        etp=cut.etp,
    )
    data = run.data.model_copy(update={"batch_sequences": dp_shard, "microbatch_sequences": 1})
    return [
        str(violation) for violation in check(run.model_copy(update={"parallel": parallel, "data": data}))
    ]


def meshes(space: Space, ranks: range) -> Table:
    """Cuts x pp x dp whose world size lies in `ranks` (whole nodes where it is more than one node)."""
    found = model_shardings(space)
    pps = np.array(space.pins.keep("pp", range(1, min(MAX_PP, space.run.model.num_layers) + 1)))
    dps = np.array(divisors(space.batch_sequences))
    columns = [
        np.array([getattr(cut, f.name) for cut in found], dtype=np.int64) for f in fields(ModelSharding)
    ]
    row, pp, dp = (grid.ravel() for grid in np.meshgrid(np.arange(len(found)), pps, dps, indexing="ij"))
    table = {f.name: column[row] for f, column in zip(fields(ModelSharding), columns, strict=True)}
    table |= {"pp": pp.astype(np.int64), "dp": dp.astype(np.int64)}
    world = table["num_ranks"] = table["tp"] * table["cp"] * pp * dp
    per_node = space.cluster.devices_per_node
    whole = (world <= per_node) | (world % per_node == 0)
    fits = whole & (world >= ranks.start) & (world < ranks.stop) & (pp <= space.run.model.num_layers)
    return where(table, fits & _pinned(space.pins, table, "num_ranks"))


def expand(space: Space, table: Table) -> Layouts:
    """Every layout on these meshes."""
    table = {name: column for name, column in table.items() if name != "num_ranks"}
    table = _expand(
        table, ("dp", "cp", "tp", "ep"), ("dp_shard", "zero"), lambda *key: _shardings(space, *key)
    )
    table = _expand(table, ("dp", "cp"), ("microbatch_sequences",), lambda *key: _microbatches(space, *key))
    table["num_microbatches"] = space.batch_sequences // (table["dp"] * table["microbatch_sequences"])
    table = where(table, _pinned(space.pins, table, "num_microbatches"))
    recomputes = _recomputes(space.pins)
    table = _expand(table, (), ("recompute", "recompute_every"), lambda: recomputes)
    key = ("pp", "num_microbatches", "recompute")
    table = _expand(table, key, ("schedule", "virtual_stages"), lambda *key: _pipelines(space, *key))
    table["dp_replicate"] = table.pop("dp") // table["dp_shard"]
    table = where(table, _pinned(space.pins, table, "dp_replicate"))
    key = ("zero", "pp", "schedule", "num_microbatches")
    table = _expand(table, key, ("reduce_last",), lambda *key: _reductions(space.run, *key))
    said = columns_from_run(space.run, table["tp"])
    said.pop("reduce_last")
    if not space.offloads:
        return Layouts(**table, **said)
    said.pop("offload")
    key = ("zero", "pp", "schedule")
    return Layouts(**_expand({**table, **said}, key, ("offload",), lambda *key: _offloads(space.run, *key)))


def _reductions(run: RunSpec, zero: int, pp: int, schedule: int, num_microbatches: int) -> list[tuple[int]]:
    """(reduce_last,): as the run says; in a pipeline ZeRO-3 is priced both ways, unless the run says last.

    ZeRO-2 that reduces last would be ZeRO-1.
    """
    said = int(run.parallel.reduce == "last")
    if pp == 1 or zero < 2 or num_microbatches == 1:
        return [(said,)]
    if said or SCHEDULES[schedule] in SPLIT_BACKWARD:
        return [(1,)]
    return [(0,)] if zero == 2 else [(1,), (0,)]


def _offloads(run: RunSpec, zero: int, pp: int, schedule: int) -> list[tuple[int]]:
    """What may live on the host, from little to much; spec/rules_memory says what goes together."""
    optimizer = 0 if run.optim.keeps_nothing else OFFLOAD_BITS["optimizer"]
    activations, parameters = OFFLOAD_BITS["activations"], OFFLOAD_BITS["parameters"]
    if pp > 1 and SCHEDULES[schedule] in SPLIT_BACKWARD:
        return [(optimizer,)] if optimizer else []
    candidates = [optimizer, activations, optimizer | activations]
    fp8 = run.precision.fp8
    stays = fp8 is not None and (fp8.recipe == "delayed" or fp8.cast_weights == "per_step")
    alone = zero == 0 and run.optim.ema_decay is None
    if not stays and (alone or (zero == 3 and pp == 1 and optimizer)):
        candidates += [optimizer | parameters, optimizer | parameters | activations]
    return [(bits,) for bits in dict.fromkeys(candidates) if bits]


def _most_offloaded(space: Space, zero: Ints, pp: Ints) -> Ints:
    """All that may leave the device, for each of these layouts."""
    one_f_one_b = SCHEDULES.index("1f1b")
    return np.array(
        [_offloads(space.run, int(z), int(p), one_f_one_b)[-1][0] for z, p in zip(zero, pp, strict=True)],
        dtype=np.int64,
    )


def columns_from_run(run: RunSpec, like: Ints) -> Table:
    """Columns that the search takes from the run as they are."""
    said = {
        "offload": offload_bits(run.memory),
        "reduce_last": int(run.parallel.reduce == "last"),
        "regather": int(run.memory.regather),
    }
    return {name: np.full_like(like, value) for name, value in said.items()}


def least_memory(space: Space, table: Table) -> Layouts:
    """For each mesh (three rows each, one per ZeRO stage) the layout that needs least memory."""
    repeated = {name: np.repeat(column, 3) for name, column in table.items() if name != "num_ranks"}
    dp = repeated.pop("dp")
    shared = dp * repeated["cp"] > 1
    num_microbatches = space.batch_sequences // dp
    one = np.ones_like(dp)
    enough = num_microbatches >= repeated["pp"]
    schedule = np.where(enough, SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe"))
    zero = np.where(shared, np.minimum(np.tile([1, 2, 3], len(dp) // 3), _max_zero(space.run)), 0)
    said = columns_from_run(space.run, one)
    if space.offloads:
        said["offload"] = _most_offloaded(space, zero, repeated["pp"])
    return Layouts(
        **repeated,
        dp_replicate=one,
        dp_shard=dp,
        zero=zero,
        microbatch_sequences=one,
        num_microbatches=num_microbatches,
        recompute=one * FULL,
        recompute_every=one,
        schedule=schedule,
        virtual_stages=one,
        **said,
    )


def _pinned(pins: Pins, table: Table, column: str) -> NDArray[np.bool_]:
    allowed = pins.allowed.get(column)
    return np.ones(len(table[column]), bool) if allowed is None else np.isin(table[column], allowed)


def where(table: Table, mask: NDArray[np.bool_]) -> Table:
    """The rows where the mask is true."""
    return {name: column[mask] for name, column in table.items()}


def _expand(
    table: Table,
    key: tuple[str, ...],
    into: tuple[str, ...],
    options: Callable[..., Sequence[tuple[int, ...]]],
) -> Table:
    """Each row once for every option of its key; options become the columns `into`."""
    num_rows = len(next(iter(table.values())))
    keys = np.stack([table[name] for name in key], axis=1) if key else np.zeros((num_rows, 1), np.int64)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.ravel()
    lists = [list(options(*(map(int, row) if key else ()))) for row in unique]
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    flat = np.array([option for each in lists for option in each], dtype=np.int64).reshape(-1, len(into))
    counts = lengths[inverse]
    rows = np.repeat(np.arange(num_rows), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    position = np.repeat(starts[inverse], counts) + np.arange(len(rows)) - first
    expanded = {name: column[rows] for name, column in table.items()}
    return expanded | {name: flat[position, index] for index, name in enumerate(into)}


def _shardings(space: Space, dp: int, cp: int, tp: int, ep: int) -> list[tuple[int, int]]:
    """(dp_shard, zero): nothing shared, all data ranks share, or (ZeRO-3) those of one or four nodes."""
    pins = space.pins
    nodes = [space.cluster.devices_per_node * count // (tp * cp) for count in (1, 4)]
    hybrid = [(size, 3) for size in nodes if 1 < size < dp]
    proposed = [(1, 0), *((size, zero) for size in (1, dp) for zero in (1, 2, 3)), *hybrid]
    if "dp_shard" in pins.allowed:
        proposed = [(size, zero) for size in pins.allowed["dp_shard"] for zero in (0, 1, 2, 3)]
    return [
        (size, zero)
        for size, zero in dict.fromkeys(proposed)
        if dp % size == 0 and _sharding_is_whole(size, zero, cp, ep) and pins.permits(zero=zero)
        if zero <= _max_zero(space.run)
    ]


def _max_zero(run: RunSpec) -> int:
    """Weights that are kept in fp8 beside themselves are whole on every rank."""
    fp8 = run.precision.fp8
    return 2 if fp8 is not None and fp8.cast_weights == "per_step" else 3


def _sharding_is_whole(dp_shard: int, zero: int, cp: int, ep: int) -> bool:
    if zero == 0:
        return dp_shard == 1 and cp % ep == 0
    return dp_shard * cp > 1 and (dp_shard * cp) % ep == 0


def _microbatches(space: Space, dp: int, cp: int) -> list[tuple[int]]:
    per_rank = space.batch_sequences // dp
    length = space.run.data.sequence_length // cp
    sizes = [d for d in divisors(per_rank) if d == 1 or d * length <= MAX_MICROBATCH_TOKENS]
    return [(size,) for size in space.pins.keep("microbatch_sequences", sizes) if per_rank % size == 0]


def _recomputes(pins: Pins) -> list[tuple[int, int]]:
    candidates = set(RECOMPUTE_CHOICES)
    for every in pins.allowed.get("recompute_every", ()):
        candidates |= {(RECOMPUTE_SELECTIVE, every), (FULL, every)}
    return [pair for pair in sorted(candidates) if pins.permits(recompute=pair[0], recompute_every=pair[1])]


def _pipelines(space: Space, pp: int, num_microbatches: int, recompute: int) -> list[tuple[int, int]]:
    """(schedule, virtual_stages) that can run."""
    if pp == 1:
        default = SCHEDULES.index("1f1b")
        return [(default, 1)] if space.pins.permits(schedule=default, virtual_stages=1) else []
    no_split = space.run.compile or recompute != RECOMPUTE_NONE
    found: list[tuple[Schedule, int]] = [
        (schedule, chunks)
        for schedule, chunks in _schedule_choices(pp, num_microbatches, space.run.model.num_layers)
        if not (no_split and schedule in SPLIT_BACKWARD)
        and space.pins.permits(schedule=SCHEDULES.index(schedule), virtual_stages=chunks)
    ]
    pinned = "schedule" in space.pins.allowed
    kept = found if pinned else [pair for pair in found if not _is_dominated(pair, found)]
    return [(SCHEDULES.index(schedule), chunks) for schedule, chunks in kept]


@cache
def _schedule_choices(pp: int, num_microbatches: int, num_layers: int) -> tuple[tuple[Schedule, int], ...]:
    chunks = [count for count in range(1, MAX_VIRTUAL_STAGES + 1) if pp * count <= num_layers]
    return tuple(
        (schedule, count)
        for schedule in SCHEDULES
        for count in chunks
        # One stage per rank is what 1f1b is for.
        if not (count == 1 and schedule in ("interleaved_1f1b", "looped_bfs"))
        and problem(schedule, PipelineShape(pp, count, num_microbatches)) is None
        # Rounds of other sizes than pp leave gaps that interleaving exists to close.
        and not (schedule.startswith("interleaved") and num_microbatches % pp)
    )


def _is_dominated(pair: tuple[Schedule, int], others: list[tuple[Schedule, int]]) -> bool:
    better: dict[Schedule, tuple[Schedule, int]] = {
        "gpipe": ("1f1b", 1),
        "looped_bfs": ("interleaved_1f1b", pair[1]),
    }
    return better.get(pair[0]) in others
