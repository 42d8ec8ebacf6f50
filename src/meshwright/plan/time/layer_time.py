"""Forward and backward of one layer, the head and the embedding for one micro-batch on one rank.

Kernel time by cause, and of the communication what the compute beside it does not hide.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.time import collectives as traffic
from meshwright.plan.time import kernels
from meshwright.plan.time.collectives import Groups, all_to_all_seconds, gather_seconds
from meshwright.plan.workload import operators
from meshwright.plan.workload.frameworks import Framework
from meshwright.plan.workload.layouts import (
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
from meshwright.plan.workload.operators import Matmul
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]

HOST_SECONDS_PER_LAUNCH = 10e-6
HOST_JITTER = 0.05
# Part of the launches left in a compiled block: its products, attention, and one kernel between them.
COMPILED_LAUNCHES = 0.4


@dataclass(frozen=True)
class Pass:
    """Seconds of one layer (or the head, or the embedding) for one micro-batch, by cause."""

    compute: Items
    exposed: Items

    @property
    def seconds(self) -> Floats:
        """Everything one after the other."""
        return sum(self.compute.values()) + sum(self.exposed.values())  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Context:
    """What every item needs: the workload on a cluster with a stack, over these layouts."""

    work: Workload
    cluster: Cluster
    stack: Framework
    at: Layouts
    groups: Groups

    @property
    def tokens(self) -> Floats:
        """Tokens of one micro-batch on one rank of cp."""
        return self.at.microbatch_tokens(self.work.sequence_length)

    def has(self, bits: int) -> Floats:
        """1 where one of these parts is recomputed (FULL recomputes every part), by the share of layers."""
        hit = (self.at.recompute & (bits | FULL)) > 0
        return hit / self.at.recompute_every

    def moved(self, num_bytes: Floats) -> Floats:
        """Seconds of a memory-bound kernel."""
        return num_bytes / kernels.copy_rate(self.cluster.device)


def context(work: Workload, at: Layouts, cluster: Cluster, stack: Framework) -> Context:
    """Bundle the inputs and lay the groups on the cluster's links."""
    return Context(work, cluster, stack, at, traffic.axis_groups(at, cluster))


def _matmuls_seconds(ctx: Context, matmuls: list[Matmul], part: str | None = None) -> tuple[Floats, Floats]:
    """Forward and backward seconds of these products; frozen weights need no weight gradient."""
    zero = np.zeros(len(ctx.at))
    forward, backward = zero, zero
    device = ctx.cluster.device
    for matmul in matmuls:
        if part is not None and matmul.part != part:
            continue
        slow = ctx.stack.narrow_slowdown if operators.is_narrow(matmul, ctx.work) else 1.0
        data, weight = matmul.backward()
        forward = forward + slow * kernels.matmul_seconds(matmul, device, ctx.work)
        backward = backward + slow * kernels.matmul_seconds(data, device, ctx.work)
        if ctx.work.adapters is None:
            backward = backward + slow * kernels.matmul_seconds(weight, device, ctx.work)
    return forward, backward


def _attention_core(ctx: Context) -> tuple[Floats, Floats]:
    """Forward and backward seconds of softmax(q k) v of one layer."""
    work, at, device = ctx.work, ctx.at, ctx.cluster.device
    core_flops = operators.attention_core_flops(work, at)
    if work.attention_kernel == "flash":
        forward = kernels.flash_seconds(core_flops, device, work, backward=False)
        return forward, kernels.flash_seconds(core_flops, device, work, backward=True)
    attention = work.model.attention
    per_head = at.microbatch_sequences * attention.num_heads / at.tp
    rows = np.full(len(at), float(work.sequence_length))
    narrow = np.full(len(at), float(attention.head_width))
    scores = Matmul("scores", rows, rows, narrow, per_head, narrow=False)
    values = Matmul("values", rows, narrow, rows, per_head, narrow=False)
    elements = operators.score_elements(work, at)
    products = kernels.matmul_seconds(scores, device, work) + kernels.matmul_seconds(values, device, work)
    forward = products + ctx.moved(operators.SCORE_PASSES_FORWARD * elements)
    return forward, 2.0 * products + ctx.moved(operators.SCORE_PASSES_BACKWARD * elements)


def _tp_seconds(ctx: Context) -> Floats:
    """One block's gather and reduce-scatter (or its all-reduce, of equal volume) over tp, forward."""
    message = ctx.tokens * ctx.work.model.width * ctx.work.working_bytes
    if ctx.stack.sequence_parallel:
        return 2.0 * gather_seconds(message, ctx.groups.tp, ctx.cluster)
    return traffic.all_reduce_seconds(message, ctx.groups.tp, ctx.cluster)


def _cp_seconds(ctx: Context) -> Floats:
    """Forward traffic of one layer's attention over cp: keys and values, or heads."""
    attention = ctx.work.model.attention
    kv = 2.0 * attention.num_kv_heads * attention.head_width / ctx.at.tp
    query = 2.0 * attention.num_heads * attention.head_width / ctx.at.tp
    kv_bytes = ctx.tokens * ctx.at.cp * kv * ctx.work.working_bytes
    ring = gather_seconds(kv_bytes, ctx.groups.cp, ctx.cluster)
    swapped = ctx.tokens * (query + kv) * ctx.work.working_bytes
    swap = 2.0 * all_to_all_seconds(swapped, ctx.groups.cp, ctx.cluster)
    is_swap = ctx.at.cp_kind == CP_KINDS.index("ulysses")
    return np.where(is_swap, swap, ring)


def _dispatch_seconds(ctx: Context) -> Floats:
    """One all-to-all of routed tokens; a narrow recipe still sends 16 bits."""
    moe = ctx.work.model.moe
    assert moe is not None
    message = operators.expert_tokens(ctx.work, ctx.at) * ctx.work.model.width * ctx.work.working_bytes
    nodes = ctx.groups.expert.nodes
    hit = 1.0 - (1.0 - 1.0 / nodes) ** moe.top_k
    far = np.minimum(nodes * hit / moe.top_k, 1.0) if ctx.stack.merges_dispatch else np.ones(len(ctx.at))
    return all_to_all_seconds(message, ctx.groups.expert, ctx.cluster, far_copies=far)


def _slower(items: Items, factor: float) -> Items:
    return {name: factor * seconds for name, seconds in items.items()}


def _layer_matmuls(ctx: Context, *, moe: bool) -> list[Matmul]:
    feed_forward = operators.moe_matmuls if moe else operators.mlp_matmuls
    return operators.attention_matmuls(ctx.work, ctx.at) + feed_forward(ctx.work, ctx.at)


def _dequantise_bytes(ctx: Context, *, moe: bool) -> Floats:
    """Bytes to widen a layer's frozen weights from 8 or 4 bits before they are multiplied."""
    adapters = ctx.work.adapters
    if adapters is None or adapters.base_bits >= 16:
        return np.zeros(len(ctx.at))
    dense, experts = layer_elements(ctx, moe=moe)
    return (adapters.base_bits / 8.0 + ctx.work.working_bytes) * (dense + experts)


def _weight_bytes(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """Bytes to cast a layer's weights for the forward pass, and to cast and add up its gradients."""
    state, work = ctx.stack.state, ctx.work
    if not ctx.stack.casts_weights or work.adapters is not None:
        return np.zeros(len(ctx.at)), np.zeros(len(ctx.at))
    dense, experts = layer_elements(ctx, moe=moe)
    narrow = work.working_bytes
    cast = narrow + state.weight if state.weight > narrow else 0.0
    widened = narrow + state.gradient if state.gradient > narrow else 0.0
    # All micro-batches but the first read the sum and write it back.
    added = 3.0 * state.gradient * (1.0 - 1.0 / ctx.at.num_microbatches)
    return cast * (dense + experts), (widened + added) * (dense + experts)


def _layer_compute(ctx: Context, *, moe: bool) -> tuple[Items, Items]:
    """Kernel seconds of one layer forward and backward, recompute as its own item."""
    matmuls = _layer_matmuls(ctx, moe=moe)
    by_part = {part: _matmuls_seconds(ctx, matmuls, part) for part in ("projection", "mlp", "experts")}
    core_forward, core_backward = _attention_core(ctx)
    bytes_forward, bytes_backward = operators.elementwise_bytes(ctx.work, ctx.at, ctx.stack, moe=moe)
    cast_forward, cast_backward = operators.quantise_bytes(ctx.work, ctx.at, ctx.stack, matmuls)
    widened = _dequantise_bytes(ctx, moe=moe)
    weights_forward, weights_backward = _weight_bytes(ctx, moe=moe)
    cheap_forward = ctx.moved(bytes_forward + cast_forward + widened + weights_forward)
    forward = {
        "matmul": sum((pair[0] for pair in by_part.values()), np.zeros(len(ctx.at))),
        "attention": core_forward,
        "elementwise": cheap_forward,
    }
    again = ctx.has(CORE_ATTENTION) * core_forward + ctx.has(NORMS | ACTIVATION) * 0.6 * cheap_forward
    again = again + ctx.has(MLP) * by_part["mlp"][0] + ctx.has(EXPERTS) * by_part["experts"][0]
    again = again + ctx.has(FULL) * (by_part["projection"][0] + 0.4 * cheap_forward)
    if ctx.stack.stops_recompute_early and not moe:
        again = again - ctx.has(FULL) * _matmuls_seconds(ctx, matmuls[-1:])[0]
    backward = {
        "matmul": sum((pair[1] for pair in by_part.values()), np.zeros(len(ctx.at))),
        "attention": core_backward,
        "elementwise": ctx.moved(bytes_backward + cast_backward + widened + weights_backward),
        "recompute": again,
    }
    slowdown = ctx.stack.kernel_slowdown
    return _slower(forward, slowdown), _slower(backward, slowdown)


def hidden(exposed: Floats, behind: Floats, share: float) -> Floats:
    """What of a transfer shows when `share` of it may run behind this much compute."""
    return np.maximum(exposed - np.minimum(share * exposed, behind), 0.0)


def layer_passes(ctx: Context, *, moe: bool) -> tuple[Pass, Pass]:
    """Forward and backward of one layer for one micro-batch, communication that shows included."""
    forward, backward = _layer_compute(ctx, moe=moe)
    stack, full = ctx.stack, ctx.has(FULL)
    compute_forward, compute_backward = total(forward), total(backward)
    tp_once = _tp_seconds(ctx)
    tp_forward = hidden(2.0 * tp_once, compute_forward, stack.tp_overlap)
    # Selective recompute gathers the inputs of column-parallel products again: half of the forward traffic.
    again = full + (0.5 * (ctx.has(NORMS) - full) if stack.keeps_matmul_outputs else 0.0)
    again = again + np.where(again == 0, 0.5 * ctx.at.regather, 0.0)
    tp_backward = hidden(2.0 * tp_once * (1.0 + again), compute_backward, stack.tp_overlap)
    cp = _cp_seconds(ctx)
    core = forward["attention"]
    shown_forward = {"tp": tp_forward, "cp": hidden(cp, core, 0.8)}
    shown_backward = {"tp": tp_backward, "cp": hidden(cp * (2.0 + full), backward["attention"], 0.8)}
    if moe:
        swap = 2.0 * _dispatch_seconds(ctx)
        shown_forward["ep"] = (1.0 - stack.ep_overlap) * swap
        shown_backward["ep"] = (1.0 - stack.ep_overlap) * swap * (1.0 + ctx.has(EXPERTS))
    gather, reduce = _fsdp_layer_seconds(ctx, moe=moe)
    shown_forward["fsdp"] = hidden(gather, compute_forward, stack.fsdp_overlap)
    shown_backward["fsdp"] = hidden(gather + reduce, compute_backward, stack.fsdp_overlap)
    slower = stack.exposed_communication
    return (
        _at_host_speed(ctx, Pass(forward, _slower(shown_forward, slower)), passes=1.0, moe=moe),
        _at_host_speed(ctx, Pass(backward, _slower(shown_backward, slower)), passes=1.5 + full, moe=moe),
    )


def _at_host_speed(ctx: Context, passed: Pass, *, passes: Floats | float, moe: bool) -> Pass:
    """A layer cannot run faster than the host launches its kernels."""
    launches = ctx.stack.launches_per_routed_layer if moe else ctx.stack.launches_per_layer
    if ctx.work.compiled:
        launches *= COMPILED_LAUNCHES
    if ctx.cluster.host.name == "c2c":
        launches *= ctx.stack.superchip_launches
    # Ranks of tp wait at every collective for the slowest host among them.
    host = passes * launches * HOST_SECONDS_PER_LAUNCH * (1.0 + HOST_JITTER * (ctx.at.tp - 1))
    waiting = np.maximum(host - passed.seconds, 0.0)
    return Pass(passed.compute, {**passed.exposed, "host": waiting})


def total(items: Items) -> Floats:
    """Everything added up."""
    return sum(items.values())  # pyright: ignore[reportReturnType]


def layer_elements(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """Parameters of one layer on one rank before any sharding: dense part and routed experts."""
    counts, at = ctx.work.counts, ctx.at
    matrices = counts.moe_layer if moe else counts.dense_layer
    dense = matrices / at.tp + counts.replicated_layer + (counts.router_layer if moe else 0)
    experts = counts.experts_layer / (at.ep * at.etp) if moe else np.zeros(len(at))
    return dense, experts


def _fsdp_layer_seconds(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """ZeRO-3 gathers a layer's weights for every pass; ZeRO-2 and 3 reduce-scatter every micro-batch.

    With a pipeline the weights stay gathered for the step.
    """
    dense, experts = layer_elements(ctx, moe=moe)
    state, groups = ctx.stack.state, ctx.groups
    trained = 1.0 if ctx.work.adapters is None else 0.0
    adapters = ctx.stack.adapters_per_group
    gather, reduce = (
        gather_seconds(
            width * dense, groups.shard, ctx.cluster, adapters=adapters, by_tree=ctx.stack.gathers_by_tree
        )
        for width in (state.gather, trained * state.reduce)
    )
    if moe:
        gather = gather + gather_seconds(state.gather * experts, groups.expert_data, ctx.cluster)
        reduce = reduce + gather_seconds(state.reduce * experts, groups.expert_data, ctx.cluster)
    return (
        np.where((ctx.at.zero == 3) & (ctx.at.pp == 1), gather, 0.0),
        np.where(ctx.at.scatters_each(in_pipelines=ctx.stack.scatters_in_pipelines), reduce, 0.0),
    )


def head_passes(ctx: Context) -> tuple[Pass, Pass]:
    """Logits and loss of one micro-batch."""
    matmul = operators.head_matmul(ctx.work, ctx.at)
    forward, backward = _matmuls_seconds(ctx, [matmul])
    logits = ctx.tokens * ctx.work.model.vocab_size / ctx.at.tp
    loss = ctx.moved(ctx.stack.logits_traffic * logits)
    tp = 0.5 * _tp_seconds(ctx) * ctx.stack.exposed_communication
    slow = ctx.stack.kernel_slowdown
    return (
        Pass({"head": slow * (forward + 0.5 * loss)}, {"tp": tp}),
        Pass({"head": slow * (backward + 0.5 * loss)}, {"tp": tp}),
    )


def embedding_passes(ctx: Context) -> tuple[Pass, Pass]:
    """Lookup and its scattered gradient."""
    moved = ctx.moved(4.0 * ctx.work.working_bytes * ctx.tokens * ctx.work.model.width)
    tp = 0.5 * _tp_seconds(ctx) * ctx.stack.exposed_communication
    return Pass({"embedding": moved}, {"tp": tp}), Pass({"embedding": 2.0 * moved}, {"tp": tp})


def _mix(work: Workload, dense: tuple[Pass, Pass] | None, moe: tuple[Pass, Pass] | None) -> tuple[Pass, Pass]:
    """The mean layer of a model that has both kinds."""
    if dense is None or moe is None:
        only = dense or moe
        assert only is not None
        return only
    share = work.counts.num_moe_layers / work.model.num_layers

    def blend(plain: Items, routed: Items) -> Items:
        names = {**plain, **routed}
        return {
            name: (1.0 - share) * plain.get(name, np.zeros(1)) + share * routed.get(name, np.zeros(1))
            for name in names
        }

    forward = Pass(blend(dense[0].compute, moe[0].compute), blend(dense[0].exposed, moe[0].exposed))
    backward = Pass(blend(dense[1].compute, moe[1].compute), blend(dense[1].exposed, moe[1].exposed))
    return forward, backward


def mean_layer(ctx: Context) -> tuple[Pass, Pass]:
    """Forward and backward of the model's mean layer."""
    counts = ctx.work.counts
    dense = layer_passes(ctx, moe=False) if counts.num_dense_layers else None
    moe = layer_passes(ctx, moe=True) if counts.num_moe_layers else None
    return _mix(ctx.work, dense, moe)
