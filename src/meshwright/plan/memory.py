"""Bytes of one rank, itemised, for the first, the second (the fullest inner one) and the last pipeline rank.

Allocated is what tensors need at the peak of the step; reserved adds what the caching allocator holds and
cannot reuse (both as torch counts them); the device is also charged the context and the communicators'
buffers, which torch does not see. Published figures are one or the other, so all three are returned, and
a layout fits when the last one does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan import work as operators
from meshwright.plan.frameworks import Framework
from meshwright.plan.layouts import (
    ACTIVATION,
    CORE_ATTENTION,
    CP_KINDS,
    EXPERTS,
    FULL,
    MLP,
    NORMS,
    Floats,
    Layouts,
)
from meshwright.plan.moments import Rank, covered_layouts, fullest_items, is_covered
from meshwright.plan.offload import (
    HOST_SHARE,
    Movable,
    move_activations,
    move_states,
    moved_activations,
)
from meshwright.plan.schedules import SCHEDULES
from meshwright.plan.workload import OPTIMIZER_BYTES, Workload

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
    def fullest_stage(self) -> NDArray[np.intp]:
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
    chunks = np.minimum(
        (micro * virtual)[:, None], ((virtual - 1) * pp)[:, None] + 2 * (pp[:, None] - ranks - 1) + 1
    )
    interleaved = chunks / virtual[:, None]
    # Weight gradients that lag behind keep every rank of a zero-bubble order equally full.
    lagging = np.minimum(micro, pp)[:, None] + 0 * ranks
    name = np.asarray(SCHEDULES)[at.schedule][:, None]
    held = np.where(np.isin(name, ["gpipe", "looped_bfs"]), micro[:, None] + 0 * ranks, one_f_one_b)
    held = np.where(name == "interleaved_1f1b", interleaved, held)
    held = np.where(np.isin(name, ["interleaved_zero_bubble", "zbv"]), lagging, held)
    held = np.where(name == "dualpipev", lagging + 0.5, held)
    return np.where((pp == 1)[:, None], 1.0, held.astype(np.float64))


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
    split = operators.stage_layers(work, at, balanced=stack.balances_stages)
    layers = np.stack([split.first, split.most, split.last], axis=1)
    alone = (at.pp == 1)[:, None]
    moe_share = counts.num_moe_layers / work.model.num_layers
    matrices = (1.0 - moe_share) * counts.dense_layer + moe_share * counts.moe_layer
    per_layer = _column(matrices / at.tp + counts.replicated_layer + moe_share * counts.router_layer)
    experts = _column(moe_share * counts.experts_layer / (at.ep * at.etp))
    table, head = _column(counts.embedding / at.tp), _column((counts.head or counts.embedding) / at.tp)
    ends = np.concatenate([table, np.zeros_like(table), head], axis=1)
    both = _column((counts.embedding + counts.head) / at.tp)
    dense = layers * per_layer + np.where(alone, both, ends)
    unit = np.maximum(per_layer + experts, np.where(alone, _column(counts.embedding / at.tp), ends))
    inner = work.model.width * work.model.mlp.width / at.tp
    matrix = np.maximum(_column(inner), experts / 3.0)
    largest = np.maximum(np.where(alone, _column(counts.embedding / at.tp), ends), matrix) + matrix
    return _Rank(dense, layers * experts, layers, per_layer + experts, unit, largest)


def expert_shards(at: Layouts) -> Floats:
    """Ranks that share one copy of the state of an expert."""
    inside_tp = np.where(at.etp > 1, 1, at.tp)
    return np.maximum(at.dp_shard * at.cp * inside_tp / at.ep, 1.0)


def _state_items(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Items:
    """Weights, gradients, master and optimizer states as the ZeRO stage divides them."""
    shards = _column(at.shards.astype(np.float64))
    experts = _column(expert_shards(at))
    zero = at.zero[:, None]
    whole = ((at.reduce_last == 1) & (at.pp == 1))[:, None]

    def held(bytes_each: float, from_stage: int) -> Floats:
        divided = (zero >= from_stage) & ~(whole & (from_stage == 2))
        return (
            (2.0 if work.precision == "fp64" else 1.0)
            * bytes_each
            * (rank.dense / np.where(divided, shards, 1.0) + rank.experts / np.where(divided, experts, 1.0))
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
    all_of_it = (rank.dense + rank.experts) * (stack.state.gather + trained * stack.state.reduce)
    sharded = np.where((at.pp > 1)[:, None], all_of_it, moment)
    scatter = trained * unit * (stack.state.gather + stack.state.reduce)
    shards = (at.shards > 1)[:, None]
    zero = at.zero[:, None]
    return np.where(shards & (zero == 3), sharded, np.where(shards & (zero == 2), scatter, 0.0))


def layer_activation_bytes(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> Floats:
    """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
    kept = _kept_parts(work, at, stack, moe=moe)
    bits = at.recompute

    def unless(part: int, value: Floats) -> Floats:
        return np.where((bits & part) > 0, 0.0, value)

    # A narrow recipe keeps the cast output of the norm for the weight gradient, recomputed or not.
    keeps_cast = work.is_narrow and not stack.recasts_inputs
    norms = kept["norms"] if keeps_cast else unless(NORMS, kept["norms"])
    partial = kept["inputs"] + norms + kept["attention"]
    partial = partial + unless(CORE_ATTENTION, kept["scores"]) + unless(NORMS, kept["rotations"])
    inner = kept["inner"] + unless(ACTIVATION, kept["activation"])
    partial = partial + unless(EXPERTS if moe else MLP, inner)
    if stack.keeps_matmul_outputs:
        outputs = 2.0 * work.working_bytes * at.microbatch_tokens(work.sequence_length) * work.model.width
        partial = partial + np.where((bits & NORMS) > 0, outputs - kept["inputs"] / 2.0, 0.0)
    none = sum(kept.values())
    with_policy = np.where((bits & FULL) > 0, kept["inputs"] / 2.0, partial)
    return none + (with_policy - none) / at.recompute_every  # pyright: ignore[reportReturnType]


def _kept_parts(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> Items:
    """What the backward pass of one layer needs, by the part that a recompute policy may drop.

    16-bit elements per token: layer inputs 2h (before each norm), norm outputs 2h, queries, keys, values
    and the attention output, and of the MLP its two inner products, the activation's output and the
    product. Gathered inputs of column-parallel linears are whole on every rank of tp where a stack keeps
    them.
    """
    model, tp = work.model, at.tp
    attention = model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    width = work.working_bytes
    residual_tokens = tokens / tp if stack.sequence_parallel else tokens
    residual = width * residual_tokens * model.width
    gathered = width * tokens * model.width if stack.saves_gathered_input else residual
    gathered = np.where(at.regather == 1, residual, gathered)
    stream = residual if work.compiled else np.maximum(stack.residual_bytes, width) / width * residual
    heads = attention.num_heads * (attention.head_width + attention.value_width)
    kv = attention.num_kv_heads * (attention.head_width + attention.value_width)
    core = width * tokens * (heads + kv) / tp + 4.0 * tokens * attention.num_heads / tp
    rotations = 0.0 * residual
    if model.positions == "rope" and not work.compiled:
        rotated = (attention.num_heads + attention.num_kv_heads) * attention.head_width
        rotations = stack.rotation_bytes * tokens * rotated / tp
    masks = 2.0 * residual_tokens * model.width if model.dropout > 0 else 0.0 * residual
    scores = 0.0 * residual
    if work.attention_kernel == "unfused":
        scores = (2.0 * width + 1.0) * operators.score_elements(work, at)
    inner, activation = _inner_bytes(work, at, stack, moe=moe)
    parts = {
        "inputs": 2.0 * stream,
        "norms": 2.0 * gathered + masks,
        "attention": core,
        "rotations": rotations,
        "scores": scores,
        "inner": inner,
        "activation": activation,
    }
    return _in_8_bits(work, at, parts, moe=moe) if work.is_narrow and stack.recasts_inputs else parts


def _in_8_bits(work: Workload, at: Layouts, parts: Items, *, moe: bool) -> Items:
    """The same where linears keep their inputs in 8 bits: of norms, of attention (beside the kernel's own
    copy), and the MLP's product, which a compiled block makes again from what it has."""
    share, attention = work.narrow_layers, work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    product = 1.0 if moe and not work.narrow_experts else 0.0 if work.compiled else 0.5
    return {
        **parts,
        "norms": (1.0 - 0.5 * share) * parts["norms"],
        "attention": parts["attention"]
        + share * tokens * attention.num_heads * attention.value_width / at.tp,
        "activation": (1.0 - (1.0 - product) * share) * parts["activation"],
    }


def _inner_bytes(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> tuple[Floats, Floats]:
    """Bytes of the MLP's inner tensors: what its products made, and what its activation made of them."""
    model, width = work.model, work.working_bytes
    tokens = at.microbatch_tokens(work.sequence_length)
    if not moe or model.moe is None:
        elements = tokens * model.mlp.width / at.tp
        into = model.mlp.num_matrices - 1
        made = 2.0 if stack.eager_activation and not work.compiled and into == 2 else 1.0
        return width * into * elements, width * made * elements
    routed = operators.expert_tokens(work, at)
    inner = routed * model.moe.width / at.etp + tokens * model.moe.shared_width / at.tp
    dispatched = width * 2.0 * routed * model.width + 8.0 * tokens / at.tp * model.moe.num_experts
    made = 2.0 if stack.eager_activation and not work.compiled else 1.0
    return width * 2.0 * inner + dispatched, width * made * inner


def _activation_items(work: Workload, at: Layouts, stack: Framework, rank: _Rank) -> Items:
    counts = work.counts
    share = counts.num_moe_layers / work.model.num_layers
    dense = layer_activation_bytes(work, at, stack, moe=False) if share < 1 else 0.0
    routed = layer_activation_bytes(work, at, stack, moe=True) if share > 0 else 0.0
    per_layer = _column((1.0 - share) * dense + share * routed)
    whole = sum(_kept_parts(work, at, stack, moe=share > 0.5).values())
    working = np.where((at.recompute & FULL) > 0, whole, 0.25 * np.asarray(whole))
    flight = in_flight(at)
    items = {
        "activations": flight * rank.layers * per_layer,
        "working set": _column(working) * np.ones((1, 3)),
    }
    if stack.casts_weights and work.working_bytes < stack.state.weight and work.adapters is None:
        each = work.working_bytes * (rank.dense + rank.experts)
        dropped = (at.zero == 3) | ((at.recompute & FULL) > 0)
        items["cast weights"] = np.where(dropped[:, None], 0.0, flight * each)
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
    alone = at.pp == 1
    return np.stack([np.where(alone, logits, embedded), np.where(alone, logits, 0.0), logits], axis=1)


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
    if stack.gradients_after_activations and "gradients" in items:
        late = covered_layouts(at) if is_covered(work, stack) else np.zeros((len(at), 1), dtype=bool)
        items["gradients"] = np.where(late, items["gradients"], _gradients_at_the_peak(at, items))
    return Memory(items, FRAGMENTATION * short_lived, outside_bytes(at), host)


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


def movable_activation_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Bytes of the mean layer and one micro-batch that offload of activations moves.

    Of a recomputed block that is its input: what selective recompute keeps is not autograd's to hand out.
    """
    share = work.counts.num_moe_layers / work.model.num_layers
    moved = np.zeros(len(at))
    for moe, part in ((False, 1.0 - share), (True, share)):
        if part:
            kept = _kept_parts(work, at, stack, moe=moe)
            everything = np.asarray(sum(kept.values()))
            again = (kept["inputs"] / 2.0 - everything) / at.recompute_every
            moved = moved + part * (everything + np.where(at.recompute > 0, again, 0.0))
    return moved


def _at_the_fullest_moment(work: Workload, at: Layouts, stack: Framework, rank: _Rank, items: Items) -> Items:
    """The items of our own runtime, moment by moment, where its sums are known; the others as they were."""
    whole = sum(_kept_parts(work, at, stack, moe=False).values()) + _kept_over_cp(work, at)
    facts = Rank(rank.layers, in_flight(at), _column(whole))
    state = {name: items[name] for name in ("weights", "gradients", "master", "optimizer")}
    fullest = fullest_items(work, at, stack, facts, state)
    fullest["workspace"] = items["workspace"]
    covered, nothing = covered_layouts(at), np.zeros((len(at), 3))
    return {
        name: np.where(covered, fullest.get(name, nothing), items.get(name, nothing))
        for name in {**items, **fullest}
    }


def _kept_over_cp(work: Workload, at: Layouts) -> Floats:
    """What a kind of cp keeps beside its own rows: all keys and values, or the output in both layouts."""
    attention = work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length) * work.working_bytes / at.tp
    keys = tokens * attention.num_kv_heads * (attention.head_width + attention.value_width)
    output = tokens * attention.num_heads * attention.value_width
    kind = np.asarray(CP_KINDS)[at.cp_kind]
    exchanged = np.where(np.isin(kind, ("ulysses", "hierarchical")), output, 0.0)
    return np.where(at.cp > 1, np.where(kind == "gather", (at.cp - 1) * keys, exchanged), 0.0)


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
