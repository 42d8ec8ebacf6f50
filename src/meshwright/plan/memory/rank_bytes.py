"""Bytes of one rank, itemised, for the first, the second (the fullest inner one) and the last pipeline rank.

Allocated is what tensors need at the peak of the step; reserved adds what the caching allocator holds and
cannot reuse (both as torch counts them); the device is also charged the context and the communicators'
buffers, which torch does not see. Published figures are one or the other, so all three are returned, and
a layout fits when the last one does.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.activations import (
    kept_parts,
    layer_activation_bytes,
    movable_activation_bytes,
)
from meshwright.plan.memory.offload import (
    HOST_SHARE,
    Movable,
    move_activations,
    move_states,
    moved_activations,
)
from meshwright.plan.memory.phases import Rank, covered_layouts, fullest_items, is_covered
from meshwright.plan.memory.rank_facts import expert_padding
from meshwright.plan.workload import operators
from meshwright.plan.workload.layouts import (
    CP_KINDS,
    FULL,
    Floats,
    Layouts,
)
from meshwright.plan.workload.schedules import (
    SCHEDULES,
    SPLIT_BACKWARD,
    PipelineShape,
    actions,
    peak_in_flight,
    problem,
)
from meshwright.plan.workload.workload import OPTIMIZER_BYTES, Workload
from meshwright.spec.parallel import Schedule
from meshwright.spec.stages import V_SCHEDULES

GIB = float(2**30)
# CUDA context and lazily loaded kernels; the first collective on a node; each further communicator.
CONTEXT_BYTES = 0.55 * GIB
FIRST_COMMUNICATOR_BYTES = 0.9 * GIB
COMMUNICATOR_BYTES = 0.25 * GIB
WORKSPACE_BYTES = 0.1 * GIB
# The gradient of the head is summed over chunks of logits in fp32, beside the head in the dtype of compute.
HEAD_GRADIENT_BYTES = 4.0
# Part of the short-lived bytes (activations, gathered weights, logits) that the allocator holds beyond need.
FRAGMENTATION = 0.06
# The same where need is known to the byte: 2 to 4% in bench/results/rehearsal_h200_2026-11-15.md.
EXACT_FRAGMENTATION = 0.03
FIT_SHARE = 0.98
STAGES = ("first", "middle", "last")

Items = dict[str, Floats]


@dataclass(frozen=True)
class Memory:
    """Bytes by item; every array has shape (N, 3): first, middle and last pipeline rank."""

    items: Items
    fragmentation: Floats
    """Reserved and not allocated."""
    outside: Items
    """On the device and not torch's: context and communicators."""
    host: Items
    """In host memory, by what `memory.offload` put there."""

    @property
    def allocated_bytes(self) -> Floats:
        """Peak of what tensors need, per stage."""
        return _total(self.items)

    @property
    def reserved_bytes(self) -> Floats:
        """Peak of what torch's allocator holds, per stage."""
        return self.allocated_bytes + self.fragmentation

    @property
    def device_bytes(self) -> Floats:
        """Peak of what the process holds on the device, per stage."""
        return self.reserved_bytes + sum(self.outside.values())

    @property
    def peak_allocated_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.allocated_bytes.max(axis=1)

    @property
    def peak_reserved_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.reserved_bytes.max(axis=1)

    @property
    def peak_device_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.device_bytes.max(axis=1)

    @property
    def peak_host_bytes(self) -> Floats:
        """Of the rank that keeps most in host memory, shape (N,)."""
        return _total(self.host).max(axis=1)

    def fits(self, cluster: Cluster) -> NDArray[np.bool_]:
        """Whether the fullest rank stays inside the device with a margin for what the estimate misses, and
        the ranks of a node inside its host memory."""
        here = self.peak_device_bytes <= FIT_SHARE * cluster.device.memory_bytes
        return here & self.fits_host(cluster)

    def fits_host(self, cluster: Cluster) -> NDArray[np.bool_]:
        """Whether what the ranks of a node offload stays inside its host memory."""
        return self.peak_host_bytes * cluster.devices_per_node <= HOST_SHARE * cluster.host_memory_bytes

    @property
    def peak_stage(self) -> NDArray[np.intp]:
        """Which of the three ranks is fullest, shape (N,)."""
        return self.reserved_bytes.argmax(axis=1)


def _total(items: Items) -> Floats:
    return sum(items.values())  # pyright: ignore[reportReturnType]


def _column(values: ArrayLike) -> Floats:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))[:, None]


def in_flight(at: Layouts) -> Floats:
    """Micro-batches whose activations a rank holds at its peak, per stage; units of the rank's layers."""
    micro, pp, virtual = at.num_microbatches, at.pp, at.virtual_stages
    ranks = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1], axis=1)
    one_f_one_b = np.minimum(micro[:, None], pp[:, None] - ranks)
    per_round = micro // np.maximum(micro // pp, 1)
    chunks = np.minimum(
        (micro * virtual)[:, None], ((virtual - 1) * per_round)[:, None] + 2 * (pp[:, None] - ranks - 1) + 1
    )
    interleaved = chunks / virtual[:, None]
    name = np.asarray(SCHEDULES)[at.schedule][:, None]
    held = np.where(np.isin(name, ["gpipe", "looped_bfs"]), micro[:, None] + 0 * ranks, one_f_one_b)
    held = np.where(name == "interleaved_1f1b", interleaved, held).astype(np.float64)
    for row in np.flatnonzero(np.isin(name[:, 0], sorted(SPLIT_BACKWARD)) & (pp > 1)):
        held[row] = _simulated_in_flight(
            SCHEDULES[int(at.schedule[row])], int(pp[row]), int(virtual[row]), int(micro[row])
        )
    return np.where((pp == 1)[:, None], 1.0, held.astype(np.float64))


@cache
def _simulated_in_flight(schedule: Schedule, pp: int, virtual: int, micro: int) -> tuple[float, ...]:
    """Micro-batches in flight on the first, the second and the last rank, counted in the schedule's order.

    From some micro-batch on the order repeats itself, so a long one is counted on a shorter one.
    """
    most = 4 * pp * virtual
    if micro > most:
        micro = most + micro % pp
    shape = PipelineShape(pp, virtual, micro)
    if problem(schedule, shape) is not None:
        return (float(min(micro, pp)),) * 3
    orders = actions(schedule, shape)
    return tuple(peak_in_flight(orders[rank]) / virtual for rank in (0, min(1, pp - 1), pp - 1))


@dataclass(frozen=True)
class _Rank:
    """Parameters of each of the three ranks before ZeRO divides anything, shape (N, 3)."""

    dense: Floats
    experts: Floats
    layers: Floats
    layer: Floats
    """Of the mean layer."""
    largest_unit: Floats
    largest_matrices: Floats
    """The largest tensor and the largest of a layer, which may follow it."""


def _rank_parameters(work: Workload, at: Layouts, stack: Framework) -> _Rank:
    counts = work.counts
    split = (
        operators.runtime_stage_layers(work, at)
        if stack.cuts_by_cost
        else operators.stage_layers(work, at, balanced=stack.balances_stages)
    )
    layers = np.stack([split.first, split.most, split.last], axis=1)
    alone = (at.pp == 1)[:, None]
    moe_share = counts.num_moe_layers / work.model.num_layers
    matrices = (1.0 - moe_share) * counts.dense_layer + moe_share * counts.moe_layer
    per_layer = _column(matrices / at.tp + counts.replicated_layer + moe_share * counts.router_layer)
    experts = _column(moe_share * counts.experts_layer / (at.ep * at.etp))
    table, head = _column(counts.embedding / at.tp), _column((counts.head or counts.embedding) / at.tp)
    none = np.zeros_like(table)
    ends = np.where(
        _is_v(at)[:, None],
        np.concatenate([table + head, none, none], axis=1),
        np.concatenate([table, none, head], axis=1),
    )
    both = _column((counts.embedding + counts.head) / at.tp)
    dense = layers * per_layer + np.where(alone, both, ends)
    # Experts that lie whole on their rank are never gathered.
    gathered = np.where(_column(expert_shards(at, stack)) > 1, experts, 0.0)
    unit = np.maximum(per_layer + gathered, np.where(alone, _column(counts.embedding / at.tp), ends))
    inner = work.model.width * work.model.mlp.width / at.tp
    matrix = np.maximum(_column(inner), experts / 3.0)
    largest = np.maximum(np.where(alone, _column(counts.embedding / at.tp), ends), matrix) + matrix
    return _Rank(dense, layers * experts, layers, per_layer + experts, unit, largest)


def expert_shards(at: Layouts, stack: Framework) -> Floats:
    """Ranks that share one copy of the state of an expert."""
    inside_tp = np.where((at.etp > 1) | stack.cuts_between_experts, 1, at.tp)
    return np.maximum(at.dp_shard * at.cp * inside_tp / at.ep, 1.0)


def expert_share(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Part of the state of its experts that the fullest of these ranks holds."""
    shards, moe = expert_shards(at, stack), work.model.moe
    if moe is None or not stack.cuts_between_experts:
        return 1.0 / shards
    here = np.maximum(moe.num_experts / at.ep, 1.0)
    return np.ceil(here / shards) / here


def _state_items(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Items:
    """Weights, gradients, master and optimizer states as the ZeRO stage divides them."""
    shards = _column(at.shards.astype(np.float64))
    share = _column(expert_share(work, at, stack))
    zero = at.zero[:, None]
    # ZeRO-3 in a pipeline keeps them beside the gathered weights: there they are counted.
    whole = ((at.reduce_last == 1) & ((at.pp == 1) | (at.zero == 2)))[:, None]

    def held(bytes_each: float, from_stage: int) -> Floats:
        divided = (zero >= from_stage) & ~(whole & (from_stage == 2))
        return (
            (2.0 if work.precision == "fp64" else 1.0)
            * bytes_each
            * (rank.dense / np.where(divided, shards, 1.0) + rank.experts * np.where(divided, share, 1.0))
        )

    state = stack.state
    if work.adapters is not None:
        trained = work.adapters.rank * 2.0 / work.model.width * 1.2
        base = held(work.adapters.base_bits / 8.0 * 1.03, 3)
        return {
            "weights": base,
            "adapters": trained * held(state.weight + state.gradient + state.master + 8.0, 3),
        }
    return {
        "weights": held(state.weight, 3),
        "gradients": held(state.gradient, 2),
        "master": held(state.master, 1),
        "optimizer": held(OPTIMIZER_BYTES[work.optimizer], 1),
    }


def _gathered_bytes(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Floats:
    """Whole weights and gradients that ZeRO-3 (and 2) keep for a moment; with a pipeline, for the step."""
    unit = rank.largest_unit
    trained = 0.0 if work.adapters else 1.0
    moment = unit * (2.0 * stack.state.gather + trained * (stack.state.gather + stack.state.reduce))
    scatter = trained * unit * (stack.state.gather + stack.state.reduce)
    each = at.scatters_each(in_pipelines=stack.scatters_in_pipelines)[:, None]
    everything = rank.dense + np.where(_column(expert_shards(at, stack)) > 1, rank.experts, 0.0)
    gradients = np.where(each, scatter, everything * trained * stack.state.reduce)
    sharded = np.where((at.pp > 1)[:, None], everything * stack.state.gather + gradients, moment)
    shards = (at.shards > 1)[:, None]
    zero = at.zero[:, None]
    return np.where(shards & (zero == 3), sharded, np.where(shards & (zero == 2), scatter, 0.0))


def _activation_items(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Items:
    counts = work.counts
    share = counts.num_moe_layers / work.model.num_layers
    dense = layer_activation_bytes(work, at, stack, moe=False) if share < 1 else 0.0
    routed = layer_activation_bytes(work, at, stack, moe=True) if share > 0 else 0.0
    per_layer = _column((1.0 - share) * dense + share * routed)
    whole = sum(kept_parts(work, at, stack, moe=share > 0.5).values())
    working = np.where((at.recompute & FULL) > 0, whole, 0.25 * np.asarray(whole))
    flight = in_flight(at)
    items = {
        "activations": flight * rank.layers * per_layer,
        "working set": _column(working) * np.ones((1, 3)),
    }
    if stack.casts_weights and work.working_bytes < stack.state.weight and work.adapters is None:
        each = work.working_bytes * rank.layers * rank.layer
        dropped = (at.zero == 3) | ((at.recompute & FULL) > 0)
        items["cast weights"] = np.where(dropped[:, None], 0.0, flight * each)
    if work.is_low_precision and work.keeps_low_precision_weights:
        matrices = (1.0 - share) * counts.dense_layer + share * counts.moe_layer
        items["fp8 weights"] = 2.0 * work.low_precision_layers * rank.layers * _column(matrices / at.tp)
    return items


def _logit_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Logits and what the loss makes of them where the head is; the embedding's output on the first rank."""
    tokens = at.microbatch_tokens(work.sequence_length)
    logits = stack.logits_bytes * tokens * work.model.vocab_size / at.tp
    if stack.loss_chunk_bytes is not None:
        whole = work.working_bytes * tokens * work.model.vocab_size / at.tp
        head = (HEAD_GRADIENT_BYTES + work.working_bytes) * work.model.vocab_size * work.model.width / at.tp
        logits = np.minimum(whole, stack.loss_chunk_bytes) + head
    embedded = work.working_bytes * tokens * work.model.width / np.where(stack.sequence_parallel, at.tp, 1)
    alone, is_v = at.pp == 1, _is_v(at)
    first = np.where(alone | is_v, logits, embedded)
    return np.stack([first, np.where(alone, logits, 0.0), np.where(is_v, 0.0, logits)], axis=1)


def _is_v(at: Layouts) -> NDArray[np.bool_]:
    """Where the second half of the stages runs back through the ranks: the first has both ends."""
    indices = [index for index, name in enumerate(SCHEDULES) if name in V_SCHEDULES]
    return (at.pp > 1) & np.isin(at.schedule, indices)


def _exchange_bytes(work: Workload, at: Layouts) -> Floats:
    """Keys and values in flight over cp, and receive buffers of the pipeline."""
    attention = work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    kv = 2.0 * attention.num_kv_heads * attention.head_width / at.tp * work.working_bytes * tokens
    gathers = at.cp_kind == CP_KINDS.index("gather")
    over_cp = np.where(at.cp > 1, np.where(gathers, at.cp * kv, 4.0 * kv), 0.0)
    hop = np.where(at.pp > 1, 2.0 * work.working_bytes * tokens * work.model.width / at.tp, 0.0)
    return _column(over_cp + hop) * np.ones((1, 3))


def memory(work: Workload, at: Layouts, cluster: Cluster, stack: Framework) -> Memory:
    """Price the memory of every layout."""
    rank = _rank_parameters(work, at, stack)
    movable = _movable(work, at, stack, rank)
    items, host = move_states(_state_items(work, at, stack, rank), at, movable)
    items["gathered"] = _gathered_bytes(work, at, stack, rank)
    items.update(_activation_items(work, at, stack, rank))
    items["logits"] = _logit_bytes(work, at, stack)
    items["exchange"] = _exchange_bytes(work, at)
    items["workspace"] = np.full((len(at), 3), WORKSPACE_BYTES)
    if is_covered(work, stack):
        items = _at_the_fullest_moment(work, at, stack, rank, items)
    host["activations"] = moved_activations(at, movable)
    move_activations(items, at, movable)
    short_lived = items["activations"] + items["gathered"] + items["logits"] + items["working set"]
    exact = covered_layouts(at) if is_covered(work, stack) else np.zeros((len(at), 1), dtype=bool)
    if stack.gradients_after_activations and "gradients" in items:
        items["gradients"] = np.where(exact, items["gradients"], _gradients_at_the_peak(at, items))
    unused = np.where(exact, EXACT_FRAGMENTATION, FRAGMENTATION) * short_lived
    return Memory(items, unused, outside_bytes(at), host)


def host_items(work: Workload, at: Layouts, stack: Framework) -> Items:
    """Bytes in host memory alone, whatever the device; shape (N, 3)."""
    rank = _rank_parameters(work, at, stack)
    movable = _movable(work, at, stack, rank)
    _, host = move_states(_state_items(work, at, stack, rank), at, movable)
    return {**host, "activations": moved_activations(at, movable)}


def host_peak_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """In host memory on the rank that keeps most there, shape (N,)."""
    return _total(host_items(work, at, stack)).max(axis=1)


def _movable(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Movable:
    """What of this offload can reach."""
    shards = np.where(at.zero >= 1, at.shards, 1)
    return Movable(
        block_share=rank.layers * rank.layer / (rank.dense + rank.experts),
        layers=rank.layers,
        in_flight=in_flight(at),
        layer_activations=_column(movable_activation_bytes(work, at, stack)),
        largest_states=OPTIMIZER_BYTES[work.optimizer] * rank.largest_matrices / _column(shards),
    )


def _at_the_fullest_moment(work: Workload, at: Layouts, stack: Framework, rank: _Rank, items: Items) -> Items:
    """The items of our own runtime, moment by moment, where its sums are known; the others as they were."""
    sharded = rank.dense / _column(at.shards) + rank.experts * _column(expert_share(work, at, stack))
    padding = 0.0 if work.model.moe is None else _column(expert_padding(work, at))
    facts = Rank(
        layers=rank.layers,
        in_flight=in_flight(at),
        parameters=rank.dense + rank.experts,
        sharded_parameters=sharded,
        gathered_parameters=rank.dense + padding * rank.experts,
    )
    state = {name: items[name] for name in ("weights", "gradients", "master", "optimizer")}
    fullest = fullest_items(work, at, stack, facts, state)
    fullest["workspace"] = items["workspace"]
    covered, nothing = covered_layouts(at), np.zeros((len(at), 3))
    return {
        name: np.where(covered, fullest.get(name, nothing), items.get(name, nothing))
        for name in {**items, **fullest}
    }


def _gradients_at_the_peak(at: Layouts, items: Items) -> Floats:
    """Gradients that exist beside the activations: all of them once a second micro-batch runs."""
    once = ((at.num_microbatches == 1) & (at.pp == 1))[:, None]
    freed = items["activations"] + items["logits"]
    return np.where(once, np.maximum(items["gradients"] - freed, 0.0), items["gradients"])


def outside_bytes(at: Layouts) -> Items:
    """What the device holds and torch does not see: the context and the communicators."""
    axes = [at.tp > 1, at.dp * at.cp > 1, at.pp > 1, at.cp > 1, at.ep > 1]
    num_axes = np.sum(np.stack([axis.astype(np.float64) for axis in axes]), axis=0)
    communicators = np.where(
        num_axes > 0, FIRST_COMMUNICATOR_BYTES + COMMUNICATOR_BYTES * np.maximum(num_axes - 1, 0), 0.0
    )
    return {
        "context": np.full((len(at), 3), CONTEXT_BYTES),
        "communicators": _column(communicators) * np.ones((1, 3)),
    }
