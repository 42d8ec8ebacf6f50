"""Seconds of one layer, the head and the embedding for one micro-batch on one rank, forward and backward.

Each time consists of kernel time by cause and of exposed communication: what does not overlap with compute.
"""

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.time import kernels
from meshwright.plan.time.collectives import all_to_all_seconds, gather_seconds
from meshwright.plan.time.layer_bytes import adapter_bytes, dequantise_bytes, layer_elements, weight_bytes
from meshwright.plan.time.pass_time import Context, Items, PassTime, exposed_seconds, taken, total
from meshwright.plan.workload import operators
from meshwright.plan.workload.layouts import (
    ACTIVATION,
    CORE_ATTENTION,
    CP_KINDS,
    EXPERTS,
    FULL,
    MLP,
    NORMS,
    Floats,
)
from meshwright.plan.workload.operators import Matmul

HOST_SECONDS_PER_LAUNCH = 10e-6
# Relative delay of the slowest host, for each further rank of tp.
HOST_JITTER = 0.05
# Share of the launches left in a compiled block: its matmuls, attention, and one fused kernel between them.
COMPILED_LAUNCHES = 0.4
# Share of the cp traffic that may overlap with attention.
CP_OVERLAP = 0.8
# Share of an exchange of rows that may overlap with experts where `ep_overlap` is set. Assumed as for cp: the
# overlap was not measured on several GPUs.
EP_OVERLAP = 0.8
# What decides the shapes of a layer's matmuls, and the time of all its kernels: not ZeRO, the world size and
# the schedule.
MATMUL_COLUMNS = ("microbatch_sequences", "cp", "tp", "ep", "etp", "ep_overlap")
KERNEL_COLUMNS = (
    *(*MATMUL_COLUMNS, "num_microbatches", "recompute", "recompute_every"),
    *("cp_kind", "cp_inner", "cp_stripes"),
)
PARTS = ("projection", "mlp", "experts")
Passes = tuple[Floats, Floats]
"""Seconds forward and backward."""


def _scaled(items: Items, factor: float) -> Items:
    return {name: factor * seconds for name, seconds in items.items()}


# Kernels -------------------------------------------------------------------------------------------------


def _matmuls_seconds(
    ctx: Context, matmuls: list[Matmul], part: str | None = None, *, trains: bool = False
) -> tuple[Floats, Floats]:
    """Forward and backward seconds of these matmuls; frozen weights have no weight gradient, unless those of
    these matmuls are trained in full beside adapters."""
    zero = np.zeros(len(ctx.at))
    forward, backward = zero, zero
    for matmul in matmuls:
        if part is not None and matmul.part != part:
            continue
        input_gradient, weight_gradient = matmul.backward()
        forward = forward + _matmul_seconds(ctx, matmul)
        backward = backward + _matmul_seconds(ctx, input_gradient)
        if ctx.workload.adapters is None or trains:
            backward = backward + _matmul_seconds(ctx, weight_gradient)
    adapters = ctx.workload.adapters
    times = 2.0 if adapters is not None and adapters.repeats_frozen else 1.0
    return times * forward, times * backward


def _matmul_seconds(ctx: Context, matmul: Matmul) -> Floats:
    is_fp8 = operators.runs_in_low_precision(matmul, ctx.workload)
    slowdown = ctx.framework.low_precision_slowdown if is_fp8 else 1.0
    return slowdown * kernels.matmul_seconds(
        matmul, ctx.cluster.device, ctx.workload, grouped_rate=ctx.framework.grouped_rate
    )


def _layer_matmuls(ctx: Context, *, moe: bool) -> list[Matmul]:
    feed_forward = operators.moe_matmuls if moe else operators.mlp_matmuls
    return operators.attention_matmuls(ctx.workload, ctx.at) + feed_forward(ctx.workload, ctx.at)


def _elementwise_seconds(ctx: Context, matmuls: list[Matmul], *, moe: bool) -> tuple[Floats, Floats]:
    """Forward and backward seconds of everything between matmuls and attention: norms, activations, casts."""
    framework, workload = ctx.framework, ctx.workload
    compiled = framework.compiled_share(workload, ctx.at, moe=moe)
    plain = operators.elementwise_bytes(
        workload,
        ctx.at,
        moe=moe,
        passes=compiled * framework.compiled_passes + (1.0 - compiled) * framework.elementwise_passes,
        residual_tokens=framework.residual_tokens(ctx.tokens, ctx.at.tp),
    )
    cast = operators.quantise_bytes(workload, ctx.at, matmuls, weight_cast_bytes=framework.weight_cast_bytes)
    dequantised, weights = dequantise_bytes(ctx, moe=moe), weight_bytes(ctx, moe=moe)
    adapters = adapter_bytes(ctx, matmuls)
    forward, backward = (
        ctx.copy_seconds(plain[side] + cast[side] + dequantised + weights[side] + adapters[side])
        for side in (0, 1)
    )
    return forward, backward


def _layer_compute(ctx: Context, *, moe: bool) -> tuple[Items, Items]:
    """Kernel seconds of one layer forward and backward, once for layouts whose kernels are alike."""
    few, index = ctx.distinct(*KERNEL_COLUMNS)
    forward, backward = _kernel_seconds(few, moe=moe)
    return taken(forward, index), taken(backward, index)


def _layer_matmuls_seconds(ctx: Context, *, moe: bool) -> tuple[dict[str, Passes], Floats]:
    """Seconds of a layer's matmuls by part, and of the last one forward, once for each set of shapes."""
    few, index = ctx.distinct(*MATMUL_COLUMNS)
    matmuls = _layer_matmuls(few, moe=moe)
    by_part = {part: _at(_matmuls_seconds(few, matmuls, part), index) for part in PARTS}
    return by_part, _at(_matmuls_seconds(few, matmuls[-1:]), index)[0]


def _at(passes: Passes, index: NDArray[np.intp]) -> Passes:
    return passes[0][index], passes[1][index]


def _kernel_seconds(ctx: Context, *, moe: bool) -> tuple[Items, Items]:
    """Kernel seconds of one layer forward and backward, with recompute as an item of its own."""
    by_part, last_matmul = _layer_matmuls_seconds(ctx, moe=moe)
    attention = ctx.framework.attention_seconds(ctx.workload, ctx.at, ctx.cluster.device)
    elementwise = _elementwise_seconds(ctx, _layer_matmuls(ctx, moe=moe), moe=moe)
    forward, backward = (
        {
            "matmul": sum((pair[side] for pair in by_part.values()), np.zeros(len(ctx.at))),
            "attention": attention[side],
            "elementwise": elementwise[side],
        }
        for side in (0, 1)
    )
    recomputed = ctx.recomputes(CORE_ATTENTION) * attention[0]
    recomputed = recomputed + ctx.recomputes(NORMS | ACTIVATION) * 0.6 * elementwise[0]
    recomputed = recomputed + ctx.recomputes(MLP) * by_part["mlp"][0]
    recomputed = recomputed + ctx.recomputes(EXPERTS) * by_part["experts"][0]
    recomputed = recomputed + ctx.recomputes(FULL) * (by_part["projection"][0] + 0.4 * elementwise[0])
    if not moe:
        skipped = 1.0 - ctx.framework.recomputed_last_matmul
        recomputed = recomputed - skipped * ctx.recomputes(FULL) * last_matmul
    backward["recompute"] = recomputed
    slowdown = ctx.framework.kernel_slowdown
    return _scaled(forward, slowdown), _scaled(backward, slowdown)


# Communication -------------------------------------------------------------------------------------------


def _tp_seconds(ctx: Context) -> Floats:
    """Communication of one sublayer (attention or MLP) over tp, forward."""
    message = ctx.tokens * ctx.workload.model.width * ctx.workload.working_bytes
    return ctx.framework.tp_seconds(message, ctx.groups.tp, ctx.cluster)


def _cp_seconds(ctx: Context) -> Floats:
    """Communication of one layer's attention over cp, forward: keys and values, or heads (ulysses)."""
    attention = ctx.workload.model.attention
    kv = 2.0 * attention.num_kv_heads * attention.head_width / ctx.at.tp
    query = 2.0 * attention.num_heads * attention.head_width / ctx.at.tp
    kv_bytes = ctx.tokens * ctx.at.cp * kv * ctx.workload.working_bytes
    ring = gather_seconds(kv_bytes, ctx.groups.cp, ctx.cluster)
    head_bytes = ctx.tokens * (query + kv) * ctx.workload.working_bytes
    ulysses = 2.0 * all_to_all_seconds(head_bytes, ctx.groups.cp, ctx.cluster)
    return np.where(ctx.at.cp_kind == CP_KINDS.index("ulysses"), ulysses, ring)


def _dispatch_seconds(ctx: Context, share: float = 1.0) -> tuple[Floats, Floats]:
    """The all-to-alls of a share of the routed tokens in one pass, to their experts and back."""
    moe, workload, framework = ctx.workload.model.moe, ctx.workload, ctx.framework
    assert moe is not None
    elements = share * operators.expert_tokens(workload, ctx.at) * workload.model.width
    copies = framework.network_copies(ctx.groups.expert.nodes, moe)
    there, back = (
        all_to_all_seconds(width * elements, ctx.groups.expert, ctx.cluster, far_copies=copies)
        for width in (framework.dispatch_bytes(workload), workload.working_bytes)
    )
    return there, back


def _fsdp_seconds(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """All-gather of a layer's weights for one pass (ZeRO-3), reduce-scatter of its gradients (ZeRO-2 and 3).

    With a pipeline the weights stay unsharded for the step.
    """
    dense, experts = layer_elements(ctx, moe=moe)
    framework, groups = ctx.framework, ctx.groups
    state, trained = framework.state, 1.0 if ctx.workload.adapters is None else 0.0
    gather, reduce = (
        gather_seconds(
            width * dense,
            groups.shard,
            ctx.cluster,
            adapters=framework.adapters_per_group,
            by_tree=framework.gathers_by_tree,
        )
        for width in (state.gather, trained * state.reduce)
    )
    if moe:
        passes = ctx.at.expert_passes  # FSDP gathers and reduces at every call of the experts
        gather = gather + passes * gather_seconds(state.gather * experts, groups.expert_data, ctx.cluster)
        reduce = reduce + passes * gather_seconds(state.reduce * experts, groups.expert_data, ctx.cluster)
    scatters = ctx.at.scatters_each(in_pipelines=framework.scatters_in_pipelines)
    return (
        np.where((ctx.at.zero == 3) & (ctx.at.pp == 1), gather, 0.0),
        np.where(scatters, reduce, 0.0),
    )


def _exposed_tp(ctx: Context, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Exposed communication of one layer over tp beside this compute, forward and backward."""
    framework, full = ctx.framework, ctx.recomputes(FULL)
    once = _tp_seconds(ctx)
    repeated = full + framework.selective_regathers * (ctx.recomputes(NORMS) - full)
    repeated = repeated + np.where(repeated == 0, 0.5 * ctx.at.regather, 0.0)
    return (
        exposed_seconds(2.0 * once, forward, framework.tp_overlap),
        exposed_seconds(2.0 * once * (1.0 + repeated), backward, framework.tp_overlap),
    )


def _exposed_ep(ctx: Context, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Exposed all-to-alls of one routed layer, forward and backward, by the layout's `ep_overlap`.

    Without it they may overlap with this compute of another micro-batch, if the framework does that.
    """
    passes, share = 1.0 + ctx.recomputes(EXPERTS), ctx.framework.ep_overlap_share(ctx.at)
    there, back = _dispatch_seconds(ctx)
    plain = (
        exposed_seconds(there + back, forward, share),
        exposed_seconds(passes * (there + back), backward, share),
    )
    overlap = ctx.at.ep_overlap
    if not overlap.any():
        return plain
    first, second = _beside_experts(ctx, 0), _beside_experts(ctx, 1)
    both = [one + (passes - 1.0) * other for one, other in zip(second, first, strict=True)]
    return np.choose(overlap, (plain[0], *first)), np.choose(overlap, (plain[1], *both))


def _beside_experts(ctx: Context, side: int) -> tuple[Floats, Floats]:
    """Exposed all-to-alls of one pass with `ep_overlap` shared and halves; `side` 1 is the backward.

    `shared` overlaps one of the two with the shared experts. `halves` makes them four: two overlap with the
    experts of the other half, and one with the shared experts.
    """
    matmuls, slowdown = operators.moe_matmuls(ctx.workload, ctx.at), ctx.framework.kernel_slowdown
    shared, experts = (slowdown * _matmuls_seconds(ctx, matmuls, part)[side] for part in ("mlp", "experts"))
    (there, back), (half_there, half_back) = _dispatch_seconds(ctx), _dispatch_seconds(ctx, 0.5)
    by_shared = exposed_seconds(there, shared, EP_OVERLAP) + back
    first, inner, last = (
        exposed_seconds(half_there, shared, EP_OVERLAP),
        exposed_seconds(half_there, 0.5 * experts, EP_OVERLAP),
        exposed_seconds(half_back, 0.5 * experts, EP_OVERLAP),
    )
    return by_shared, first + inner + last + half_back


# Layer, head and embedding -------------------------------------------------------------------------------


def layer_time(ctx: Context, *, moe: bool) -> tuple[PassTime, PassTime]:
    """Forward and backward of one layer for one micro-batch, exposed communication included."""
    forward, backward = _layer_compute(ctx, moe=moe)
    framework, full = ctx.framework, ctx.recomputes(FULL)
    compute_forward, compute_backward = total(forward), total(backward)
    tp_forward, tp_backward = _exposed_tp(ctx, compute_forward, compute_backward)
    cp = _cp_seconds(ctx)
    exposed_forward = {"tp": tp_forward, "cp": exposed_seconds(cp, forward["attention"], CP_OVERLAP)}
    exposed_backward = {
        "tp": tp_backward,
        "cp": exposed_seconds(cp * (2.0 + full), backward["attention"], CP_OVERLAP),
    }
    if moe:
        ep = _exposed_ep(ctx, compute_forward, compute_backward)
        exposed_forward["ep"], exposed_backward["ep"] = ep
    gather, reduce = _fsdp_seconds(ctx, moe=moe)
    exposed_forward["fsdp"] = exposed_seconds(gather, compute_forward, framework.fsdp_overlap)
    exposed_backward["fsdp"] = exposed_seconds(gather + reduce, compute_backward, framework.fsdp_overlap)
    slower = framework.exposed_communication
    return (
        _with_host(ctx, PassTime(forward, _scaled(exposed_forward, slower)), passes=1.0, moe=moe),
        _with_host(ctx, PassTime(backward, _scaled(exposed_backward, slower)), passes=1.5 + full, moe=moe),
    )


def _with_host(ctx: Context, device: PassTime, *, passes: Floats | float, moe: bool) -> PassTime:
    """The pass with the time that the device waits for the host to launch its kernels."""
    compiled = ctx.framework.compiled_share(ctx.workload, ctx.at, moe=moe)
    launches = ctx.framework.launches(ctx.workload, ctx.cluster, moe=moe)
    launches = launches * (1.0 - (1.0 - COMPILED_LAUNCHES) * compiled)
    # At every collective the ranks of tp wait for the slowest host among them.
    host = passes * launches * HOST_SECONDS_PER_LAUNCH * (1.0 + HOST_JITTER * (ctx.at.tp - 1))
    slowdown = ctx.framework.routed_slowdown if moe else 1.0
    device = PassTime(_scaled(device.compute, slowdown), _scaled(device.exposed, slowdown))
    return PassTime(device.compute, {**device.exposed, "host": np.maximum(host - device.seconds, 0.0)})


def head_time(ctx: Context) -> tuple[PassTime, PassTime]:
    """Forward and backward of logits and loss for one micro-batch."""
    workload, multiple = ctx.workload, ctx.framework.padded_vocabulary
    vocabulary = workload.model.vocab_size / ctx.at.tp
    padded = np.ceil(vocabulary / multiple) * multiple
    trains = workload.adapters is not None and workload.adapters.trains_head
    head = operators.head_matmul(workload, ctx.at, padded)
    forward, backward = _matmuls_seconds(ctx, [head], trains=trains)
    loss = ctx.copy_seconds(ctx.framework.logits_traffic * ctx.tokens * vocabulary)
    if ctx.framework.pads_at_run_time:
        copied = np.where(padded > vocabulary, padded * workload.model.width, 0.0)
        forward = forward + ctx.copy_seconds(2.0 * workload.working_bytes * copied)
    tp = 0.5 * _tp_seconds(ctx) * ctx.framework.exposed_communication
    slowdown = ctx.framework.kernel_slowdown
    return (
        PassTime({"head": slowdown * (forward + 0.5 * loss)}, {"tp": tp}),
        PassTime({"head": slowdown * (backward + 0.5 * loss)}, {"tp": tp}),
    )


def embedding_time(ctx: Context) -> tuple[PassTime, PassTime]:
    """Lookup of the embeddings and scatter of their gradient for one micro-batch."""
    moved = ctx.copy_seconds(4.0 * ctx.workload.working_bytes * ctx.tokens * ctx.workload.model.width)
    tp = 0.5 * _tp_seconds(ctx) * ctx.framework.exposed_communication
    return PassTime({"embedding": moved}, {"tp": tp}), PassTime({"embedding": 2.0 * moved}, {"tp": tp})


def mean_layer_time(ctx: Context) -> tuple[PassTime, PassTime]:
    """Forward and backward of the mean layer of a model, which may have dense and MoE layers."""
    counts = ctx.workload.counts
    if not counts.num_moe_layers:
        return layer_time(ctx, moe=False)
    routed = layer_time(ctx, moe=True)
    if not counts.num_dense_layers:
        return routed
    share = counts.num_moe_layers / ctx.workload.model.num_layers
    forward, backward = (
        PassTime(
            _mean(dense.compute, moe.compute, share),
            _mean(dense.exposed, moe.exposed, share),
        )
        for dense, moe in zip(layer_time(ctx, moe=False), routed, strict=True)
    )
    return forward, backward


def _mean(dense: Items, moe: Items, share: float) -> Items:
    return {
        name: (1.0 - share) * dense.get(name, np.zeros(1)) + share * moe.get(name, np.zeros(1))
        for name in {**dense, **moe}
    }
