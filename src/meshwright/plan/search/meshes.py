"""Every device mesh worth pricing, as a table of arrays: degrees of tp, cp, ep, etp, pp and dp.

The rules (`spec/check`) decide which degrees a model allows; they are not repeated here.
"""

from dataclasses import asdict, dataclass, fields
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import Question
from meshwright.plan.workload.layouts import CP_KINDS, EP_OVERLAPS, Ints
from meshwright.spec.check import is_valid
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.run import RunSpec

MAX_CP, MAX_PP, MAX_EP = 64, 64, 64
CP_STRIPES, LEAST_CHUNK = 4, 256  # stripes of separate documents over cp; rows of a chunk
Table = dict[str, Ints]
"""Columns of equal length by name; a row is a mesh or a layout."""


@dataclass(frozen=True)
class ModelSharding:
    """How tp, cp and ep shard the model; data and pipeline parallelism come on top."""

    tp: int
    cp: int
    cp_kind: int
    cp_inner: int
    cp_stripes: int
    ep: int
    etp: int
    ep_overlap: int


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def meshes(question: Question, num_ranks: range) -> Table:
    """Model shardings x pp x dp with a world size in `num_ranks`; more than one node means full nodes."""
    run, pins = question.run, question.pins
    found = model_shardings(question, num_ranks[-1] if len(num_ranks) else 0)
    pps = np.array(pins.restrict("pp", range(1, min(MAX_PP, run.model.num_layers) + 1)))
    dps = np.array(divisors(run.data.batch_sequences))
    row, pp, dp = (grid.ravel() for grid in np.meshgrid(np.arange(len(found)), pps, dps, indexing="ij"))
    table: Table = {"pp": pp.astype(np.int64), "dp": dp.astype(np.int64)}
    for field in fields(ModelSharding):
        column = np.array([getattr(sharding, field.name) for sharding in found], dtype=np.int64)
        table[field.name] = column[row]
    world = table["num_ranks"] = table["tp"] * table["cp"] * pp * dp
    per_node = question.cluster.devices_per_node
    full_nodes = (world <= per_node) | (world % per_node == 0)
    is_wanted = (world >= num_ranks.start) & (world < num_ranks.stop) & (pp <= run.model.num_layers)
    has_ep = dp * table["cp"] % table["ep"] == 0  # ep borrows its ranks from dp and cp
    return filter_rows(table, full_nodes & is_wanted & has_ep & is_pinned(pins, table, "num_ranks"))


def model_shardings(question: Question, max_ranks: int) -> list[ModelSharding]:
    """Every sharding of the model over so many ranks at most that the rules and the pins allow."""
    return [
        sharding
        for sharding in _proposed_shardings(question)
        if sharding.tp * sharding.cp <= max_ranks
        and question.pins.permits(**asdict(sharding))
        and is_valid(_smallest_run(question.run, sharding))
    ]


def _proposed_shardings(question: Question) -> list[ModelSharding]:
    run, pins = question.run, question.pins
    attention, moe = run.model.attention, run.model.moe
    heads = gcd(attention.num_heads, attention.num_kv_heads)
    tps = pins.restrict("tp", [d for d in divisors(heads) if d <= question.cluster.devices_per_node])
    max_cp = min(MAX_CP, max(1, run.data.sequence_length // question.min_cp_positions))
    cps = pins.restrict("cp", [2**k for k in range(max_cp.bit_length())])
    eps = pins.restrict("ep", _ep_degrees(moe.num_experts) if moe else [1])
    return [
        ModelSharding(tp, cp, kind, inner, stripes, ep, etp, overlap)
        for tp, cp, ep in product(tps, cps, eps)
        for kind, inner in _cp_kinds(cp, pins)
        for stripes in pins.restrict("cp_stripes", [_cp_stripes(run, kind, cp, tp)])
        for etp in pins.restrict("etp", [1])
        for overlap in _ep_overlaps(ep, question)
    ]


def _ep_degrees(num_experts: int) -> list[int]:
    """Powers of two up to MAX_EP, and one expert per rank."""
    return [
        d for d in divisors(num_experts) if (d & (d - 1) == 0 and d <= MAX_EP) or d == num_experts <= MAX_EP
    ]


def _cp_kinds(cp: int, pins: Pins) -> list[tuple[int, int]]:
    """(cp_kind, cp_inner) for this degree of context parallel."""
    if cp == 1:
        return [(0, 1)]
    kinds = pins.restrict("cp_kind", range(len(CP_KINDS)))
    inner = pins.restrict("cp_inner", [d for d in divisors(cp) if 1 < d < cp])
    hierarchical = CP_KINDS.index("hierarchical")
    return [(kind, size) for kind in kinds for size in (inner if kind == hierarchical else [1])]


def _cp_stripes(run: RunSpec, kind: int, cp: int, tp: int) -> int:
    """As many stripes as leave chunks long enough for full kernels, up to CP_STRIPES."""
    if cp == 1 or CP_KINDS[kind] != "gather" or run.data.documents != "separate":
        return 1
    chunks, stripes = run.data.sequence_length // (2 * cp), CP_STRIPES
    while stripes > 1 and (
        chunks // stripes < LEAST_CHUNK or run.data.sequence_length % (2 * cp * tp * stripes)
    ):
        stripes //= 2
    return stripes


def _ep_overlaps(ep: int, question: Question) -> list[int]:
    """Positions in EP_OVERLAPS for this degree; the search tries others than the run's where pins name them.

    The overlap is priced, but was not measured on several GPUs.
    """
    if ep == 1:
        return [0]
    return question.pins.restrict("ep_overlap", [EP_OVERLAPS.index(question.run.parallel.ep_overlap)])


def _smallest_run(run: RunSpec, sharding: ModelSharding) -> RunSpec:
    """The run with this sharding on the fewest ranks, for the rules to check."""
    dp_shard = sharding.ep // gcd(sharding.ep, sharding.cp)
    parallel = ParallelSpec(
        dp_shard=dp_shard,
        zero=max_zero(run) if dp_shard * sharding.cp > 1 else 0,
        cp=sharding.cp,
        cp_kind=CP_KINDS[sharding.cp_kind],
        cp_inner=sharding.cp_inner,
        cp_stripes=sharding.cp_stripes,
        tp=sharding.tp,
        ep=sharding.ep,
        etp=sharding.etp,
        ep_overlap=EP_OVERLAPS[sharding.ep_overlap],
    )
    data = run.data.model_copy(update={"batch_sequences": dp_shard, "microbatch_sequences": 1})
    return run.model_copy(update={"parallel": parallel, "data": data})


def max_zero(run: RunSpec) -> int:
    """The highest ZeRO stage: 2 where fp8 weights are cast once per step, because they stay unsharded."""
    fp8 = run.precision.fp8
    return 2 if fp8 is not None and fp8.cast_weights == "per_step" else 3


def is_pinned(pins: Pins, table: Table, column: str) -> NDArray[np.bool_]:
    """Rows whose value in a column the pins allow."""
    allowed = pins.allowed.get(column)
    return np.ones(len(table[column]), bool) if allowed is None else np.isin(table[column], allowed)


def filter_rows(table: Table, mask: NDArray[np.bool_]) -> Table:
    """The rows where the mask is true."""
    return {name: column[mask] for name, column in table.items()}
