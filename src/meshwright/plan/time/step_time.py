"""Step time of a layout, itemised: kernels, what communication shows, the bubble, the update.

    step = micro-batches x slowest rank + fill and drain of the pipeline
         + gradient traffic that the last backward pass does not hide + update + host transfers

All functions work on arrays of layouts and are pure.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.memory.activations import movable_activation_bytes
from meshwright.plan.memory.offload import host_rate
from meshwright.plan.time import collectives as traffic
from meshwright.plan.time.collectives import gather_seconds
from meshwright.plan.time.layer_time import (
    Context,
    Items,
    Pass,
    context,
    embedding_passes,
    head_passes,
    hidden,
    layer_elements,
    mean_layer,
    total,
)
from meshwright.plan.time.timeline import StageSeconds
from meshwright.plan.workload import operators
from meshwright.plan.workload.frameworks import Framework
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import OPTIMIZER_BYTES, Workload

# Bytes that AdamW's update on the host reads and writes per parameter, clipping included.
UPDATE_BYTES = 34.0
HOST_UPDATE_BYTES_PER_SECOND = 60e9
COMMUNICATION = ("tp", "cp", "ep", "fsdp", "pp", "dp")


@dataclass(frozen=True)
class StepCost:
    """Seconds of one optimizer step, itemised so that the items sum to `step_seconds`."""

    items: Items
    relative_half_width: Floats
    """Of the 90% interval: a rate for kernels, more where communication, routing or the host decide."""
    forward_layer_seconds: Floats
    backward_layer_seconds: Floats
    head_seconds: tuple[Floats, Floats]
    embedding_seconds: tuple[Floats, Floats]
    hop_seconds: Floats

    @property
    def step_seconds(self) -> Floats:
        """One optimizer update."""
        return total(self.items)

    @property
    def low_seconds(self) -> Floats:
        """Lower end of the 90% interval."""
        return self.step_seconds / (1.0 + self.relative_half_width)

    @property
    def high_seconds(self) -> Floats:
        """Upper end of the 90% interval."""
        return self.step_seconds * (1.0 + self.relative_half_width)


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
    items["offload"] = items["offload"] + micro * _offload_seconds(ctx, forward, backward, split.most)
    return StepCost(
        items=items,
        relative_half_width=half_width(work, items, stack),
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
    dense, _ = layer_elements(ctx, moe=False)
    dense_moe, experts = layer_elements(ctx, moe=True) if counts.num_moe_layers else (dense, 0.0 * dense)
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
    replicas = traffic.all_reduce_seconds(
        stack.state.reduce * dense / np.where(at.zero >= 2, at.shards, 1), ctx.groups.replicate, ctx.cluster
    )
    # ZeRO-3 gathers in the passes: what is left for the end is the scatter, where it waits so long.
    scatter = np.where(
        (at.zero == 3) & (at.pp == 1), _once_seconds(ctx, stack.state.reduce, dense, experts), reduce
    )
    each = at.scatters_each(in_pipelines=stack.scatters_in_pipelines)
    gathered = np.where(at.pp > 1, _once_seconds(ctx, stack.state.gather, dense, experts), 0.0)
    shown = np.where(each, replicas + gathered, scatter)
    # Gradients hide behind the last backward pass, gathered weights behind the next forward pass.
    exposed = stack.exposed_communication * hidden(shown, one_microbatch, stack.dp_overlap)
    owned = (dense + experts) / np.where(at.zero >= 1, at.shards, 1)
    optimizer = OPTIMIZER_BYTES[work.optimizer]
    update = stack.kernel_slowdown * ctx.moved((stack.state.update + 2.0 * optimizer) * owned)
    states = at.offloads("optimizer") * owned * (optimizer + stack.state.master)
    weights = at.offloads("parameters") * owned * stack.state.weight
    streamed = np.maximum((states + weights) / host_rate(ctx.cluster) - update, 0.0)
    # ZeRO-3 with parameters on the host: gradients end there, and the update runs there.
    on_host = (at.offloads("parameters") == 1) & (at.zero == 3)
    slow = owned * UPDATE_BYTES / HOST_UPDATE_BYTES_PER_SECOND
    return {
        "dp": exposed,
        "optimizer": np.where(on_host, 0.0, update),
        "offload": np.where(on_host, slow, streamed),
    }


def _once_seconds(ctx: Context, width: float, dense: Floats, experts: Floats) -> Floats:
    """One all-gather of all weights of a rank, or one reduce-scatter of their gradients."""
    return gather_seconds(width * dense, ctx.groups.shard, ctx.cluster) + gather_seconds(
        width * experts, ctx.groups.expert_data, ctx.cluster
    )


def _offload_seconds(ctx: Context, forward: Pass, backward: Pass, layers: Floats) -> Floats:
    """What copies of activations and weights show beside the compute of one micro-batch."""
    at, rate = ctx.at, host_rate(ctx.cluster)
    activations = at.offloads("activations") * movable_activation_bytes(ctx.work, at, ctx.stack) / rate
    share = ctx.work.counts.num_moe_layers / ctx.work.model.num_layers
    dense, experts = layer_elements(ctx, moe=share > 0.5)
    shards = np.where(at.zero == 3, at.shards, 1)
    each = ctx.stack.state.weight * (dense + experts) / shards / rate
    weights = at.offloads("parameters") * each
    gradients = np.where(at.zero == 3, weights, 0.0)
    out = hidden(np.maximum(activations, weights), forward.seconds, 1.0)
    back = hidden(np.maximum(activations + weights, gradients), backward.seconds, 1.0)
    return layers * (out + back)


def _reduce_seconds(ctx: Context, elements: Floats, members: traffic.Group) -> Floats:
    """All-reduce of gradients, or reduce-scatter of gradients and gather of updated weights (ZeRO-1)."""
    state = ctx.stack.state
    messages = np.ceil(state.reduce * elements / ctx.stack.bucket_bytes)
    whole = traffic.all_reduce_seconds(state.reduce * elements, members, ctx.cluster, messages=messages)
    by_tree = ctx.stack.gathers_by_tree
    scatter, gather = (
        gather_seconds(width * elements, members, ctx.cluster, messages=messages, by_tree=by_tree)
        for width in (state.reduce, state.gather)
    )
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


def half_width(work: Workload, items: Items, stack: Framework) -> Floats:
    """Relative half-width of the 90% interval, from how much of the step each uncertain cause takes."""
    step = total(items)
    widths = stack.interval
    zero = 0.0 * step
    communication = sum((items.get(name, zero) for name in COMMUNICATION), zero) / step
    waiting = (items.get("host", zero) + items.get("bubble", zero) + items.get("imbalance", zero)) / step
    routed = widths.routed if work.model.moe is not None else 0.0
    return widths.kernels + widths.communication * communication + widths.waiting * waiting + routed
