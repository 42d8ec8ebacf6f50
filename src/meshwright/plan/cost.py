"""Step time of a layout, itemised: kernels, what communication shows, the bubble, the update.

    step = micro-batches x slowest rank + fill and drain of the pipeline
         + gradient traffic that the last backward pass does not hide + update + host transfers

All functions work on arrays of layouts and are pure.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Cluster
from meshwright.plan import kernels, traffic
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
from meshwright.plan.schedules import SCHEDULES
from meshwright.plan.timeline import StageSeconds
from meshwright.plan.traffic import Groups, all_to_all_seconds, gather_seconds
from meshwright.plan.work import Matmul
from meshwright.plan.workload import OPTIMIZER_BYTES, Workload

Items = dict[str, Floats]

# Bytes the fused AdamW update reads and writes per parameter, clipping included.
UPDATE_BYTES = 34.0
HOST_SECONDS_PER_LAUNCH = 10e-6
HOST_JITTER = 0.05
HOST_UPDATE_BYTES_PER_SECOND = 60e9


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
        data, weight = matmul.backward()
        forward = forward + kernels.matmul_seconds(matmul, device, ctx.work)
        backward = backward + kernels.matmul_seconds(data, device, ctx.work)
        if ctx.work.adapters is None:
            backward = backward + kernels.matmul_seconds(weight, device, ctx.work)
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


def _layer_compute(ctx: Context, *, moe: bool) -> tuple[Items, Items]:
    """Kernel seconds of one layer forward and backward, recompute as its own item."""
    matmuls = _layer_matmuls(ctx, moe=moe)
    by_part = {part: _matmuls_seconds(ctx, matmuls, part) for part in ("projection", "mlp", "experts")}
    core_forward, core_backward = _attention_core(ctx)
    bytes_forward, bytes_backward = operators.elementwise_bytes(ctx.work, ctx.at, ctx.stack, moe=moe)
    cast_forward, cast_backward = operators.quantise_bytes(ctx.work, matmuls)
    cheap_forward = ctx.moved(bytes_forward + cast_forward)
    forward = {
        "matmul": sum((pair[0] for pair in by_part.values()), np.zeros(len(ctx.at))),
        "attention": core_forward,
        "elementwise": cheap_forward,
    }
    again = ctx.has(CORE_ATTENTION) * core_forward + ctx.has(NORMS | ACTIVATION) * 0.6 * cheap_forward
    again = again + ctx.has(MLP) * by_part["mlp"][0] + ctx.has(EXPERTS) * by_part["experts"][0]
    again = again + ctx.has(FULL) * (by_part["projection"][0] + 0.4 * cheap_forward)
    backward = {
        "matmul": sum((pair[1] for pair in by_part.values()), np.zeros(len(ctx.at))),
        "attention": core_backward,
        "elementwise": ctx.moved(bytes_backward + cast_backward),
        "recompute": again,
    }
    slowdown = ctx.stack.kernel_slowdown
    return _slower(forward, slowdown), _slower(backward, slowdown)


def _hidden(exposed: Floats, behind: Floats, share: float) -> Floats:
    """What of a transfer shows when `share` of it may run behind this much compute."""
    return np.maximum(exposed - np.minimum(share * exposed, behind), 0.0)


def layer_passes(ctx: Context, *, moe: bool) -> tuple[Pass, Pass]:
    """Forward and backward of one layer for one micro-batch, communication that shows included."""
    forward, backward = _layer_compute(ctx, moe=moe)
    stack, full = ctx.stack, ctx.has(FULL)
    compute_forward, compute_backward = _total(forward), _total(backward)
    tp_once = _tp_seconds(ctx)
    tp_forward = _hidden(2.0 * tp_once, compute_forward, stack.tp_overlap)
    tp_backward = _hidden(2.0 * tp_once * (1.0 + full), compute_backward, stack.tp_overlap)
    cp = _cp_seconds(ctx)
    core = forward["attention"]
    shown_forward = {"tp": tp_forward, "cp": _hidden(cp, core, 0.8)}
    shown_backward = {"tp": tp_backward, "cp": _hidden(cp * (2.0 + full), backward["attention"], 0.8)}
    if moe:
        swap = 2.0 * _dispatch_seconds(ctx)
        shown_forward["ep"] = (1.0 - stack.ep_overlap) * swap
        shown_backward["ep"] = (1.0 - stack.ep_overlap) * swap * (1.0 + ctx.has(EXPERTS))
    gather, reduce = _fsdp_layer_seconds(ctx, moe=moe)
    shown_forward["fsdp"] = _hidden(gather, compute_forward, stack.fsdp_overlap)
    shown_backward["fsdp"] = _hidden(gather + reduce, compute_backward, stack.fsdp_overlap)
    slower = stack.exposed_communication
    return (
        _at_host_speed(ctx, Pass(forward, _slower(shown_forward, slower)), passes=1.0, moe=moe),
        _at_host_speed(ctx, Pass(backward, _slower(shown_backward, slower)), passes=1.5 + full, moe=moe),
    )


def _at_host_speed(ctx: Context, passed: Pass, *, passes: Floats | float, moe: bool) -> Pass:
    """A layer cannot run faster than the host launches its kernels."""
    launches = ctx.stack.launches_per_routed_layer if moe else ctx.stack.launches_per_layer
    # Ranks of tp wait at every collective for the slowest host among them.
    host = passes * launches * HOST_SECONDS_PER_LAUNCH * (1.0 + HOST_JITTER * (ctx.at.tp - 1))
    waiting = np.maximum(host - passed.seconds, 0.0)
    return Pass(passed.compute, {**passed.exposed, "host": waiting})


def _total(items: Items) -> Floats:
    return sum(items.values())  # pyright: ignore[reportReturnType]


def _layer_elements(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """Parameters of one layer on one rank before any sharding: dense part and routed experts."""
    counts, at = ctx.work.counts, ctx.at
    matrices = counts.moe_layer if moe else counts.dense_layer
    dense = matrices / at.tp + counts.replicated_layer
    experts = counts.experts_layer / (at.ep * at.etp) if moe else np.zeros(len(at))
    return dense, experts


def _fsdp_layer_seconds(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """ZeRO-3 gathers a layer's weights for every pass; ZeRO-2 and 3 reduce-scatter every micro-batch.

    With a pipeline the weights stay gathered for the step and gradients are summed at its end.
    """
    dense, experts = _layer_elements(ctx, moe=moe)
    state, groups = ctx.stack.state, ctx.groups
    trained = 1.0 if ctx.work.adapters is None else 0.0
    adapters = ctx.stack.adapters_per_group
    gather = gather_seconds(state.gather * dense, groups.shard, ctx.cluster, adapters=adapters)
    reduce = trained * gather_seconds(state.reduce * dense, groups.shard, ctx.cluster, adapters=adapters)
    if moe:
        gather = gather + gather_seconds(state.gather * experts, groups.expert_data, ctx.cluster)
        reduce = reduce + gather_seconds(state.reduce * experts, groups.expert_data, ctx.cluster)
    every = ctx.at.pp == 1
    return (
        np.where((ctx.at.zero == 3) & every, gather, 0.0),
        np.where((ctx.at.zero >= 2) & every, reduce, 0.0),
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


@dataclass(frozen=True)
class StepCost:
    """Seconds of one optimizer step, itemised so that the items sum to `step_seconds`."""

    items: Items
    low_factor: float
    high_factor: float
    forward_layer_seconds: Floats
    backward_layer_seconds: Floats
    head_seconds: tuple[Floats, Floats]
    embedding_seconds: tuple[Floats, Floats]
    hop_seconds: Floats

    @property
    def step_seconds(self) -> Floats:
        """One optimizer update."""
        return _total(self.items)

    @property
    def low_seconds(self) -> Floats:
        """Lower end of the 90% interval."""
        return self.low_factor * self.step_seconds

    @property
    def high_seconds(self) -> Floats:
        """Upper end of the 90% interval."""
        return self.high_factor * self.step_seconds


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


def _bubble_seconds(ctx: Context, mean_rank: Floats, forward_share: Floats) -> Floats:
    """Fill and drain: (p-1)/v of a rank's mean micro-batch; zero-bubble orders fill most of it."""
    at = ctx.at
    one_f_one_b = (at.pp - 1) / at.virtual_stages * mean_rank
    names = ("interleaved_zero_bubble", "zbv", "dualpipev")
    filled = np.isin(at.schedule, [SCHEDULES.index(name) for name in names])
    left = np.where(at.schedule == SCHEDULES.index("interleaved_zero_bubble"), 0.5, 0.35)
    return np.where(filled, left * one_f_one_b, one_f_one_b) + 0.0 * forward_share


def step_cost(work: Workload, at: Layouts, cluster: Cluster, stack: Framework) -> StepCost:
    """Price every layout; items in seconds per optimizer step."""
    ctx = context(work, at, cluster, stack)
    forward, backward = mean_layer(ctx)
    head, embedding = head_passes(ctx), embedding_passes(ctx)
    split = operators.stage_layers(work, at)
    alone = at.pp == 1
    micro = at.num_microbatches.astype(np.float64)
    head_all, embedding_all = (sum_pass(head), sum_pass(embedding))
    layer = forward.seconds + backward.seconds
    last = split.last * layer + head_all
    first = split.first * layer + embedding_all
    slowest = np.maximum(np.maximum(last, first), split.most * layer)
    if stack.balances_stages:
        slowest = _balanced_seconds(work, at, layer, head_all)
    slowest = np.where(alone, work.model.num_layers * layer + head_all + embedding_all, slowest)
    mean_rank = (work.model.num_layers * layer + head_all + embedding_all) / at.pp
    hop = _hop_seconds(ctx)
    items = _layer_items(forward, backward, np.where(alone, work.model.num_layers, split.most), at)
    items["head"] = micro * np.where(alone, head_all, 0.0)
    items["embedding"] = micro * np.where(alone, embedding_all, 0.0)
    held = np.where(alone, slowest, np.minimum(split.most * layer, slowest))
    items["imbalance"] = micro * (slowest - held)
    items["bubble"] = _bubble_seconds(ctx, mean_rank, forward.seconds / layer)
    items["pp"] = _pp_seconds(ctx, hop)
    items.update(_step_end(ctx, slowest))
    return StepCost(
        items=items,
        low_factor=stack.interval[0],
        high_factor=stack.interval[1],
        forward_layer_seconds=forward.seconds,
        backward_layer_seconds=backward.seconds,
        head_seconds=(head[0].seconds, head[1].seconds),
        embedding_seconds=(embedding[0].seconds, embedding[1].seconds),
        hop_seconds=hop,
    )


def _balanced_seconds(work: Workload, at: Layouts, layer: Floats, head: Floats) -> Floats:
    """The slowest rank when the last stage gives up layers for its head."""
    layers = work.model.num_layers
    mean = (layers + head / layer) / at.pp
    best = np.full(len(at), np.inf)
    for held in (np.floor(mean), np.ceil(mean)):
        left = np.maximum(layers - (at.pp - 1) * held, 0.0)
        best = np.minimum(best, np.maximum(held * layer, left * layer + head))
    return best


def sum_pass(passes: tuple[Pass, Pass]) -> Floats:
    """Forward and backward together."""
    return passes[0].seconds + passes[1].seconds


def _layer_items(forward: Pass, backward: Pass, layers: Floats, at: Layouts) -> Items:
    items: Items = {}
    for side in (forward.compute, backward.compute, forward.exposed, backward.exposed):
        for name, seconds in side.items():
            items[name] = items.get(name, np.zeros(len(at))) + at.num_microbatches * layers * seconds
    return items


def _hop_seconds(ctx: Context) -> Floats:
    """One activation to the next pipeline rank; tp ranks each send their part."""
    message = ctx.tokens * ctx.work.model.width * ctx.work.working_bytes / ctx.at.tp
    return ctx.stack.exposed_communication * traffic.send_seconds(message, ctx.at, ctx.cluster)


def _pp_seconds(ctx: Context, hop: Floats) -> Floats:
    """Sends of the steady state that show, and the hops of fill and drain."""
    at = ctx.at
    steady = (1.0 - ctx.stack.pp_overlap) * 2.0 * at.num_microbatches * at.virtual_stages * hop
    return np.where(at.pp > 1, steady + 2.0 * (at.pp - 1) * hop, 0.0)


def _rank_elements(ctx: Context) -> tuple[Floats, Floats]:
    """Dense and expert parameters of the fullest rank, before any sharding by ZeRO."""
    counts, at = ctx.work.counts, ctx.at
    split = operators.stage_layers(ctx.work, at)
    moe_share = counts.num_moe_layers / ctx.work.model.num_layers
    dense, _ = _layer_elements(ctx, moe=False)
    dense_moe, experts = _layer_elements(ctx, moe=True) if counts.num_moe_layers else (dense, 0.0 * dense)
    layers = split.most
    ends = np.where(at.pp == 1, counts.embedding + counts.head, counts.embedding) / at.tp
    return layers * ((1.0 - moe_share) * dense + moe_share * dense_moe) + ends, layers * moe_share * experts


def _step_end(ctx: Context, one_microbatch: Floats) -> Items:
    """What happens once per step: gradient reduction that shows, the update, host transfers."""
    at, stack, work = ctx.at, ctx.stack, ctx.work
    dense, experts = _rank_elements(ctx)
    if work.adapters is not None:
        dense, experts = 0.01 * dense, 0.0 * experts
    reduce = _reduce_seconds(ctx, dense, ctx.groups.data) + _reduce_seconds(
        ctx, experts, ctx.groups.expert_data
    )
    per_micro = (at.zero >= 2) & (at.pp == 1)
    replicas = traffic.all_reduce_seconds(
        stack.state.reduce * dense / np.where(at.zero >= 2, at.shards, 1), ctx.groups.replicate, ctx.cluster
    )
    shown = np.where(per_micro, replicas, reduce)
    # Gradients hide behind the last backward pass, gathered weights behind the next forward pass.
    exposed = stack.exposed_communication * _hidden(shown, one_microbatch, stack.dp_overlap)
    owned = (dense + experts) / np.where(at.zero >= 1, at.shards, 1)
    optimizer = OPTIMIZER_BYTES[work.optimizer]
    update = stack.kernel_slowdown * ctx.moved((UPDATE_BYTES - 16.0 + 2.0 * optimizer) * owned)
    moved = owned * (stack.state.gradient + stack.state.gather) / ctx.cluster.host.bytes_per_second
    on_host = moved + owned * UPDATE_BYTES / HOST_UPDATE_BYTES_PER_SECOND
    return {
        "dp": exposed,
        "optimizer": np.where(at.offload_optimizer == 1, 0.0, update),
        "offload": np.where(at.offload_optimizer == 1, on_host, 0.0),
    }


def _reduce_seconds(ctx: Context, elements: Floats, members: traffic.Group) -> Floats:
    """All-reduce of gradients, or reduce-scatter of gradients and gather of updated weights (ZeRO-1)."""
    state = ctx.stack.state
    messages = np.ceil(state.reduce * elements / ctx.stack.bucket_bytes)
    whole = traffic.all_reduce_seconds(state.reduce * elements, members, ctx.cluster, messages=messages)
    scatter = gather_seconds(state.reduce * elements, members, ctx.cluster, messages=messages)
    gather = gather_seconds(state.gather * elements, members, ctx.cluster, messages=messages)
    return np.where(ctx.at.zero == 0, whole, scatter + gather)


def stage_seconds(work: Workload, cost: StepCost, layers: list[int]) -> StageSeconds:
    """Seconds per stage of one layout (the first of `cost`) for the pipeline simulator."""
    counts = np.asarray(layers, dtype=np.float64)
    forward = counts * cost.forward_layer_seconds[0]
    backward = counts * cost.backward_layer_seconds[0]
    forward[0] += cost.embedding_seconds[0][0]
    backward[0] += cost.embedding_seconds[1][0]
    forward[-1] += cost.head_seconds[0][0]
    backward[-1] += cost.head_seconds[1][0]
    return StageSeconds(forward, 0.5 * backward, 0.5 * backward, hop=float(cost.hop_seconds[0]))
