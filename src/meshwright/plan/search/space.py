"""Every layout worth pricing on a mesh, as arrays.

What is left out is dominated: gpipe and looped_bfs keep more activations than 1f1b and interleaved_1f1b at
the same bubble, so the search prices them where those cannot run, or when they are pinned.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from meshwright.plan.search.meshes import Table, divisors, filter_rows, is_pinned, max_zero
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import Question
from meshwright.plan.workload.layouts import (
    FULL,
    OFFLOAD_BITS,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    Ints,
    Layouts,
    offload_bits,
)
from meshwright.plan.workload.schedules import SCHEDULES, SPLIT_BACKWARD, PipelineShape, problem
from meshwright.spec.adapter import EMBEDDING, is_trained
from meshwright.spec.parallel import Schedule
from meshwright.spec.run import RunSpec

MAX_VIRTUAL_STAGES = 8
MAX_MICROBATCH_TOKENS = 131072
RECOMPUTE_CHOICES = (
    (RECOMPUTE_NONE, 1),
    (RECOMPUTE_SELECTIVE, 1),
    (RECOMPUTE_SELECTIVE, 2),
    (FULL, 1),
    (FULL, 2),
    (FULL, 4),
)
"""(recompute, recompute_every) that the search proposes."""


def expand(question: Question, mesh_table: Table) -> Layouts:
    """Every layout on these meshes; what is offloaded is as in the run."""
    return Layouts(**expand_table(question, mesh_table, recompute_choices(question.pins)))


def expand_table(question: Question, mesh_table: Table, recomputes: Sequence[tuple[int, int]]) -> Table:
    """The columns of every layout with these (recompute, recompute_every); other columns are kept."""
    run, pins = question.run, question.pins
    table = {name: column for name, column in mesh_table.items() if name != "num_ranks"}
    key = ("dp", "cp", "tp", "ep")
    table = _expand(table, key, ("dp_shard", "zero"), lambda *key: _zero_choices(question, *key))
    table = _expand(
        table, ("dp", "cp"), ("microbatch_sequences",), lambda *key: _microbatches(question, *key)
    )
    table["num_microbatches"] = run.data.batch_sequences // (table["dp"] * table["microbatch_sequences"])
    table = filter_rows(table, is_pinned(pins, table, "num_microbatches"))
    table = _expand(table, (), ("recompute", "recompute_every"), lambda: recomputes)
    key = ("pp", "num_microbatches", "recompute")
    table = _expand(table, key, ("schedule", "virtual_stages"), lambda *key: _pipelines(question, *key))
    table["dp_replicate"] = table.pop("dp") // table["dp_shard"]
    table = filter_rows(table, is_pinned(pins, table, "dp_replicate"))
    key = ("zero", "pp", "schedule", "num_microbatches")
    table = _expand(table, key, ("reduce_last",), lambda *key: _reductions(run, *key))
    return {**_columns_from_run(run, table["tp"]), **table}


def offloaded(question: Question, layouts: Layouts) -> Layouts:
    """These layouts with everything that may be offloaded to host memory."""
    table = {name: column for name, column in vars(layouts).items() if name != "offload"}
    key = ("zero", "pp", "schedule", "tp")
    return Layouts(**_expand(table, key, ("offload",), lambda *key: _offloads(question.run, *key)))


def least_memory_layouts(question: Question, mesh_table: Table, *, offloads: bool) -> Layouts:
    """The layout of each mesh that needs the least memory: three rows per mesh, one for each ZeRO stage."""
    repeated = {name: np.repeat(column, 3) for name, column in mesh_table.items() if name != "num_ranks"}
    run, dp = question.run, repeated.pop("dp")
    num_microbatches = run.data.batch_sequences // dp
    one = np.ones_like(dp)
    fills_pipeline = num_microbatches >= repeated["pp"]
    schedule = np.where(fills_pipeline, SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe"))
    stages = np.minimum(np.tile([1, 2, 3], len(dp) // 3), max_zero(run))
    zero = np.where(dp * repeated["cp"] > 1, stages, 0)
    fixed = _columns_from_run(run, one)
    if offloads:
        fixed["offload"] = _most_offloaded(run, zero, repeated["pp"], repeated["tp"])
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
        **fixed,
    )


def _columns_from_run(run: RunSpec, like: Ints) -> Table:
    """Columns that the search takes from the run unchanged."""
    values = {
        "offload": offload_bits(run.memory),
        "reduce_last": int(run.parallel.grad_reduce == "last_microbatch"),
        "regather": int(run.memory.regather_tp_inputs),
    }
    return {name: np.full_like(like, value) for name, value in values.items()}


def _expand(
    table: Table,
    key: tuple[str, ...],
    into: tuple[str, ...],
    options: Callable[..., Sequence[tuple[int, ...]]],
) -> Table:
    """Each row once for every option of its key; options become the columns `into`."""
    num_rows = len(next(iter(table.values())))
    _, first_row, inverse = np.unique(_codes(table, key, num_rows), return_index=True, return_inverse=True)
    lists = [list(options(*(int(table[name][row]) for name in key))) for row in first_row]
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    flat = np.array([option for each in lists for option in each], dtype=np.int64).reshape(-1, len(into))
    counts = lengths[inverse]
    rows = np.repeat(np.arange(num_rows), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    position = np.repeat(starts[inverse], counts) + np.arange(len(rows)) - first
    expanded = {name: column[rows] for name, column in table.items()}
    return expanded | {name: flat[position, index] for index, name in enumerate(into)}


def _codes(table: Table, key: tuple[str, ...], num_rows: int) -> Ints:
    """One number for each row, equal where the columns of the key are equal."""
    codes = np.zeros(num_rows, np.int64)
    for name in key:
        codes = codes * (int(table[name].max(initial=0)) + 1) + table[name]
    return codes


def _zero_choices(question: Question, dp: int, cp: int, tp: int, ep: int) -> list[tuple[int, int]]:
    """(dp_shard, zero): DDP, sharded over all data ranks, or (ZeRO-3) over those of one or four nodes."""
    pins = question.pins
    nodes = [question.cluster.devices_per_node * count // (tp * cp) for count in (1, 4)]
    hybrid = [(size, 3) for size in nodes if 1 < size < dp]
    proposed = [(1, 0), *((size, zero) for size in (1, dp) for zero in (1, 2, 3)), *hybrid]
    if "dp_shard" in pins.allowed:
        proposed = [(size, zero) for size in pins.allowed["dp_shard"] for zero in (0, 1, 2, 3)]
    return [
        (size, zero)
        for size, zero in dict.fromkeys(proposed)
        if dp % size == 0 and _can_shard(size, zero, cp, ep) and pins.permits(zero=zero)
        if zero <= max_zero(question.run)
    ]


def _can_shard(dp_shard: int, zero: int, cp: int, ep: int) -> bool:
    """Whether a ZeRO stage has ranks to shard over, and ep divides them."""
    if zero == 0:
        return dp_shard == 1 and cp % ep == 0
    return dp_shard * cp > 1 and (dp_shard * cp) % ep == 0


def _microbatches(question: Question, dp: int, cp: int) -> list[tuple[int]]:
    data = question.run.data
    per_rank, length = data.batch_sequences // dp, data.sequence_length // cp
    sizes = [d for d in divisors(per_rank) if d == 1 or d * length <= MAX_MICROBATCH_TOKENS]
    return [(size,) for size in question.pins.restrict("microbatch_sequences", sizes) if per_rank % size == 0]


def recompute_choices(pins: Pins) -> list[tuple[int, int]]:
    """(recompute, recompute_every) that the search proposes and the pins permit."""
    choices = set(RECOMPUTE_CHOICES)
    for every in pins.allowed.get("recompute_every", ()):
        choices |= {(RECOMPUTE_SELECTIVE, every), (FULL, every)}
    return [pair for pair in sorted(choices) if pins.permits(recompute=pair[0], recompute_every=pair[1])]


def _reductions(run: RunSpec, zero: int, pp: int, schedule: int, num_microbatches: int) -> list[tuple[int]]:
    """(reduce_last,): the run's value; ZeRO-3 in a pipeline is priced both ways unless the run reduces last.

    ZeRO-2 that reduces last would be ZeRO-1.
    """
    from_run = int(run.parallel.grad_reduce == "last_microbatch")
    if pp == 1 or zero < 2 or num_microbatches == 1:
        return [(from_run,)]
    if from_run or SCHEDULES[schedule] in SPLIT_BACKWARD:
        return [(1,)]
    return [(0,)] if zero == 2 else [(1,), (0,)]


def _offloads(run: RunSpec, zero: int, pp: int, schedule: int, tp: int) -> list[tuple[int]]:
    """(offload,): what may live in host memory, from little to much, as spec/rules_memory allows."""
    optimizer = 0 if run.optim.is_stateless else OFFLOAD_BITS["optimizer"]
    activations, parameters = OFFLOAD_BITS["activations"], OFFLOAD_BITS["parameters"]
    if run.adapter is not None:  # states of adapters are small, and frozen blocks on the host are not priced
        choices = [OFFLOAD_BITS["embedding"]] if _may_move_embedding(run, zero, tp) else []
        if not (pp > 1 and SCHEDULES[schedule] in SPLIT_BACKWARD):
            choices += [activations, *(bits | activations for bits in choices)]
        return [(bits,) for bits in choices]
    if pp > 1 and SCHEDULES[schedule] in SPLIT_BACKWARD:
        return [(optimizer,)] if optimizer else []
    choices = [optimizer, activations, optimizer | activations]
    fp8 = run.precision.fp8
    fp8_stays = fp8 is not None and (fp8.recipe == "delayed" or fp8.cast_weights == "per_step")
    unsharded = zero == 0 and run.optim.ema_decay is None
    if not fp8_stays and (unsharded or (zero == 3 and pp == 1 and optimizer)):
        choices += [optimizer | parameters, optimizer | parameters | activations]
    return [(bits,) for bits in dict.fromkeys(choices) if bits]


def _may_move_embedding(run: RunSpec, zero: int, tp: int) -> bool:
    """Whether the token table may live in host memory, as spec/rules_memory allows."""
    is_only_read = not run.model.tied_head and not is_trained(EMBEDDING, run.adapter, run.train_only)
    return is_only_read and zero < 3 and tp == 1


def _most_offloaded(run: RunSpec, zero: Ints, pp: Ints, tp: Ints) -> Ints:
    """The largest offload of each of these layouts, under 1f1b."""
    one_f_one_b = SCHEDULES.index("1f1b")
    return np.array(
        [
            _offloads(run, int(z), int(p), one_f_one_b, int(t))[-1][0]
            for z, p, t in zip(zero, pp, tp, strict=True)
        ],
        dtype=np.int64,
    )


def _pipelines(question: Question, pp: int, num_microbatches: int, recompute: int) -> list[tuple[int, int]]:
    """(schedule, virtual_stages) that can run and that no other choice dominates."""
    if pp == 1:
        default = SCHEDULES.index("1f1b")
        return [(default, 1)] if question.pins.permits(schedule=default, virtual_stages=1) else []
    no_split = question.run.compile or recompute != RECOMPUTE_NONE
    found: list[tuple[Schedule, int]] = [
        (schedule, chunks)
        for schedule, chunks in _schedule_choices(pp, num_microbatches, question.run.model.num_layers)
        if not (no_split and schedule in SPLIT_BACKWARD)
        and question.pins.permits(schedule=SCHEDULES.index(schedule), virtual_stages=chunks)
    ]
    pinned = "schedule" in question.pins.allowed
    best = found if pinned else [pair for pair in found if not _is_dominated(pair, found)]
    return [(SCHEDULES.index(schedule), chunks) for schedule, chunks in best]


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
