"""Step time of a layout, itemised: kernels, exposed communication, the pipeline bubble, the update.

    step = micro-batches x slowest pipeline rank + fill and drain of the pipeline
         + gradient traffic that does not overlap with the last backward pass + update + host transfers

All functions work on arrays of layouts and are pure.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.formula import movable_activation_bytes
from meshwright.plan.time.collectives import Group, all_reduce_seconds, gather_seconds, send_seconds
from meshwright.plan.time.interval import half_width
from meshwright.plan.time.layer_bytes import layer_elements
from meshwright.plan.time.layer_time import embedding_time, head_time, mean_layer_time
from meshwright.plan.time.pass_time import Context, Items, PassTime, context, exposed_seconds, total
from meshwright.plan.time.timeline import StageSeconds
from meshwright.plan.workload import operators
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import OPTIMIZER_BYTES, Workload

# Bytes that AdamW's update on the host reads and writes per parameter, clipping included.
HOST_UPDATE_BYTES = 34.0
HOST_UPDATE_BYTES_PER_SECOND = 60e9
# Share of the host link's data-sheet rate that copies of pinned memory reach, in one direction and in each of
# both at once: bench/results/offload_h200_2026-11-16.md.
HOST_ONE_WAY, HOST_BOTH_WAYS = 0.9, 0.58
# Devices of a node share this many links to the host, as on DGX A100 and HGX H100 boards with four PCIe
# switches. On a DGX-2 with four, 16 devices get 3 GB/s each where one alone gets 12 (DeepSpeed issue 1137).
# Our own measurements are of one device.
HOST_LINKS_PER_NODE = 4
# Share of the 1f1b bubble that split backwards leave.
BUBBLE_LEFT = {"interleaved_zero_bubble": 0.5, "zbv": 0.35, "dualpipev": 0.35}
# What the time of a layer does not depend on: the schedule, its stages and offload come on top.
BESIDE_LAYERS = ("pp", "schedule", "virtual_stages", "offload")
COMMUNICATION = ("tp", "cp", "ep", "fsdp", "pp", "dp")
"""Items that are exposed communication."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one optimizer step, itemised so that the items sum to `step_seconds`."""

    items: Items
    relative_half_width: Floats
    """Relative half-width of the 90% interval of the step time."""
    forward_layer_seconds: Floats
    backward_layer_seconds: Floats
    head_seconds: tuple[Floats, Floats]
    embedding_seconds: tuple[Floats, Floats]
    hop_seconds: Floats
    """Seconds of one message between neighbouring pipeline ranks."""

    @property
    def step_seconds(self) -> Floats:
        """Seconds of one optimizer step."""
        return total(self.items)

    def row(self, index: int) -> "StepCost":
        """The cost of one layout."""
        here = slice(index, index + 1)
        return StepCost(
            items={name: np.atleast_1d(seconds)[here] for name, seconds in self.items.items()},
            relative_half_width=self.relative_half_width[here],
            forward_layer_seconds=self.forward_layer_seconds[here],
            backward_layer_seconds=self.backward_layer_seconds[here],
            head_seconds=(self.head_seconds[0][here], self.head_seconds[1][here]),
            embedding_seconds=(self.embedding_seconds[0][here], self.embedding_seconds[1][here]),
            hop_seconds=self.hop_seconds[here],
        )


def step_cost(workload: Workload, at: Layouts, cluster: Cluster, framework: Framework) -> StepCost:
    """Seconds per optimizer step of every layout, by item."""
    ctx = context(workload, at, cluster, framework)
    (forward, backward), head, embedding = _microbatch_times(ctx)
    hop = _hop_seconds(ctx)
    layer, head_both, embedding_both = (_both(pair) for pair in ((forward, backward), head, embedding))
    slowest = framework.slowest_rank_seconds(
        workload, at, layer=layer, head=head_both, embedding=embedding_both
    )
    everything = workload.model.num_layers * layer + head_both + embedding_both
    is_alone, micro = at.pp == 1, at.num_microbatches.astype(np.float64)
    slowest = np.where(is_alone, everything, slowest)
    most_layers = operators.stage_layers(workload, at).most
    items = _layer_items(forward, backward, np.where(is_alone, workload.model.num_layers, most_layers), at)
    items["head"] = micro * np.where(is_alone, head_both, 0.0)
    items["embedding"] = micro * np.where(is_alone, embedding_both, 0.0)
    in_layers = np.where(is_alone, slowest, np.minimum(most_layers * layer, slowest))
    items["imbalance"] = micro * (slowest - in_layers)
    items["bubble"] = _bubble_seconds(at, everything / at.pp)
    items["pp"] = _pp_seconds(ctx, hop)
    items.update(_step_end(ctx, slowest))
    items["offload"] = items["offload"] + micro * _offload_seconds(ctx, forward, backward, most_layers)
    return StepCost(
        items=items,
        relative_half_width=half_width(workload, at, cluster, framework),
        forward_layer_seconds=forward.seconds,
        backward_layer_seconds=backward.seconds,
        head_seconds=(head[0].seconds, head[1].seconds),
        embedding_seconds=(embedding[0].seconds, embedding[1].seconds),
        hop_seconds=hop,
    )


Passes = tuple[PassTime, PassTime]


def _microbatch_times(ctx: Context) -> tuple[Passes, Passes, Passes]:
    """Forward and backward of a layer, the head and the embedding: once for layouts that differ elsewhere."""
    at = ctx.at
    columns = [column for name, column in vars(at).items() if name not in BESIDE_LAYERS]
    distinct, index = at.distinct(*columns, at.pp > 1)
    if len(distinct) == len(at):
        return mean_layer_time(ctx), head_time(ctx), embedding_time(ctx)
    few = context(ctx.workload, distinct, ctx.cluster, ctx.framework)
    layer, head, embedding = mean_layer_time(few), head_time(few), embedding_time(few)
    return _taken(layer, index), _taken(head, index), _taken(embedding, index)


def _taken(passes: Passes, index: NDArray[np.intp]) -> Passes:
    forward, backward = (one.take(index) for one in passes)
    return forward, backward


def _both(passes: Passes) -> Floats:
    """Seconds of forward and backward together."""
    return passes[0].seconds + passes[1].seconds


def _layer_items(forward: PassTime, backward: PassTime, layers: Floats, at: Layouts) -> Items:
    """Seconds by cause of so many layers over all micro-batches."""
    items: Items = {}
    for side in (forward.compute, backward.compute, forward.exposed, backward.exposed):
        for name, seconds in side.items():
            items[name] = items.get(name, np.zeros(len(at))) + at.num_microbatches * layers * seconds
    return items


# Pipeline ------------------------------------------------------------------------------------------------


def _bubble_seconds(at: Layouts, mean_rank: Floats) -> Floats:
    """Fill and drain: (p-1)/v of a rank's mean micro-batch; split backwards fill most of it.

    With fewer micro-batches than ranks, every one of the v rounds waits for the last rank.
    """
    waits = np.maximum(at.pp - at.num_microbatches, 0)
    stages = at.virtual_stages * waits + np.minimum(at.num_microbatches, at.pp) - 1
    stages = np.where(at.virtual_stages > 1, stages, at.pp - 1)
    one_f_one_b = stages / at.virtual_stages * mean_rank
    left = np.array([BUBBLE_LEFT.get(name, 1.0) for name in SCHEDULES])
    return left[at.schedule] * one_f_one_b


def _hop_seconds(ctx: Context) -> Floats:
    """Seconds of one activation to the next pipeline rank; each rank of tp sends its shard."""
    message = ctx.tokens * ctx.workload.model.width * ctx.workload.working_bytes / ctx.at.tp
    return ctx.framework.exposed_communication * send_seconds(message, ctx.at, ctx.cluster)


def _pp_seconds(ctx: Context, hop: Floats) -> Floats:
    """Exposed sends of the steady state, and the messages of fill and drain."""
    at = ctx.at
    steady = (1.0 - ctx.framework.pp_overlap) * 2.0 * at.num_microbatches * at.virtual_stages * hop
    return np.where(at.pp > 1, steady + 2.0 * (at.pp - 1) * hop, 0.0)


def stage_seconds(cost: StepCost, layers: list[int]) -> StageSeconds:
    """Seconds per stage of one layout (the first of `cost`) for the pipeline simulator."""
    counts = np.asarray(layers, dtype=np.float64)
    forward = counts * cost.forward_layer_seconds[0]
    backward = counts * cost.backward_layer_seconds[0]
    forward[0] += cost.embedding_seconds[0][0]
    backward[0] += cost.embedding_seconds[1][0]
    forward[-1] += cost.head_seconds[0][0]
    backward[-1] += cost.head_seconds[1][0]
    return StageSeconds(forward, 0.5 * backward, 0.5 * backward, hop=float(cost.hop_seconds[0]))


# Once per step -------------------------------------------------------------------------------------------


def _rank_elements(ctx: Context) -> tuple[Floats, Floats]:
    """Dense and expert parameters of the rank with most layers, before any sharding by ZeRO."""
    counts, at = ctx.workload.counts, ctx.at
    layers = operators.stage_layers(ctx.workload, at).most
    moe_share = counts.num_moe_layers / ctx.workload.model.num_layers
    dense, _ = layer_elements(ctx, moe=False)
    dense_moe, experts = layer_elements(ctx, moe=True) if counts.num_moe_layers else (dense, 0.0 * dense)
    ends = np.where(at.pp == 1, counts.embedding + counts.head, counts.embedding) / at.tp
    return layers * ((1.0 - moe_share) * dense + moe_share * dense_moe) + ends, layers * moe_share * experts


def _step_end(ctx: Context, one_microbatch: Floats) -> Items:
    """Items that occur once per step: exposed gradient reduction, the update, host transfers."""
    dense, experts = _rank_elements(ctx)
    if ctx.workload.adapters is not None:
        share = ctx.workload.adapters.share(ctx.workload.model.width)
        dense, experts = share * dense, share * experts
    communication = _once_per_step_seconds(ctx, dense, experts)
    # Gradients overlap with the last backward pass, gathered weights with the next forward pass.
    exposed = exposed_seconds(communication, one_microbatch, ctx.framework.dp_overlap)
    sharded = (dense + experts) / np.where(ctx.at.zero >= 1, ctx.at.shards, 1)
    return {"dp": ctx.framework.exposed_communication * exposed, **_update_items(ctx, sharded)}


def _once_per_step_seconds(ctx: Context, dense: Floats, experts: Floats) -> Floats:
    """Communication over data ranks that is left for the end of a step."""
    at, framework, groups = ctx.at, ctx.framework, ctx.groups
    reduce = _reduce_seconds(ctx, dense, groups.data) + _reduce_seconds(ctx, experts, groups.expert_data)
    replicas = all_reduce_seconds(
        framework.state.reduce * dense / np.where(at.zero >= 2, at.shards, 1), groups.replicate, ctx.cluster
    )
    # ZeRO-3 gathers during the passes; the reduce-scatter is left where it is not done every micro-batch.
    scatter = np.where(
        (at.zero == 3) & (at.pp == 1),
        _all_weights_seconds(ctx, framework.state.reduce, dense, experts),
        reduce,
    )
    gathered = np.where(at.pp > 1, _all_weights_seconds(ctx, framework.state.gather, dense, experts), 0.0)
    scatters_each = at.scatters_each(in_pipelines=framework.scatters_in_pipelines)
    return np.where(scatters_each, replicas + gathered, scatter)


def host_share(cluster: Cluster) -> float:
    """The part of its link to the host, and of the host's memory bandwidth, that each device of a node gets.

    A superchip has a host of its own.
    """
    if cluster.host.name == "c2c":
        return 1.0
    return min(1.0, HOST_LINKS_PER_NODE / cluster.devices_per_node)


def _update_items(ctx: Context, elements: Floats) -> Items:
    """Seconds of the optimizer's update of so many parameters, and of what it moves to and from the host."""
    at, state = ctx.at, ctx.framework.state
    optimizer = OPTIMIZER_BYTES[ctx.workload.optimizer]
    update = ctx.framework.kernel_slowdown * ctx.copy_seconds((state.update + 2.0 * optimizer) * elements)
    share = host_share(ctx.cluster)
    rate = HOST_BOTH_WAYS * share * ctx.cluster.host.bytes_per_second
    states = at.offloads("optimizer") * elements * (optimizer + state.master)
    weights = at.offloads("parameters") * elements * state.weight
    streamed = np.maximum((states + weights) / rate - update, 0.0)
    # ZeRO-3 with parameters on the host: gradients end there, and the update runs there.
    is_on_host = (at.offloads("parameters") == 1) & (at.zero == 3)
    host_update = elements * HOST_UPDATE_BYTES / (share * HOST_UPDATE_BYTES_PER_SECOND)
    return {
        "optimizer": np.where(is_on_host, 0.0, update),
        "offload": np.where(is_on_host, host_update, streamed),
    }


def _all_weights_seconds(ctx: Context, width: float, dense: Floats, experts: Floats) -> Floats:
    """One all-gather of all weights of a rank, or one reduce-scatter of their gradients."""
    return gather_seconds(width * dense, ctx.groups.shard, ctx.cluster) + gather_seconds(
        width * experts, ctx.groups.expert_data, ctx.cluster
    )


def _reduce_seconds(ctx: Context, elements: Floats, members: Group) -> Floats:
    """All-reduce of gradients, or reduce-scatter of gradients and all-gather of updated weights (ZeRO-1)."""
    state = ctx.framework.state
    messages = np.ceil(state.reduce * elements / ctx.framework.bucket_bytes)
    all_reduce = all_reduce_seconds(state.reduce * elements, members, ctx.cluster, messages=messages)
    by_tree = ctx.framework.gathers_by_tree
    scatter, gather = (
        gather_seconds(width * elements, members, ctx.cluster, messages=messages, by_tree=by_tree)
        for width in (state.reduce, state.gather)
    )
    return np.where(ctx.at.zero == 0, all_reduce, scatter + gather)


def _offload_seconds(ctx: Context, forward: PassTime, backward: PassTime, layers: Floats) -> Floats:
    """Exposed copies of activations and weights between device and host for one micro-batch."""
    at = ctx.at
    # A pipeline alternates forwards and backwards, so that copies run in both directions at once.
    one_way = np.where(at.pp > 1, HOST_BOTH_WAYS, HOST_ONE_WAY)
    rate = one_way * host_share(ctx.cluster) * ctx.cluster.host.bytes_per_second
    movable = movable_activation_bytes(ctx.workload, at, ctx.framework)
    activations = at.offloads("activations") * movable / rate
    share = ctx.workload.counts.num_moe_layers / ctx.workload.model.num_layers
    dense, experts = layer_elements(ctx, moe=share > 0.5)
    shards = np.where(at.zero == 3, at.shards, 1)
    weights = at.offloads("parameters") * (ctx.framework.state.weight * (dense + experts) / shards / rate)
    gradients = np.where(at.zero == 3, weights, 0.0)
    out = exposed_seconds(np.maximum(activations, weights), forward.seconds, 1.0)
    back = exposed_seconds(np.maximum(activations + weights, gradients), backward.seconds, 1.0)
    return layers * (out + back) + _embedding_seconds(ctx, rate)


def _embedding_seconds(ctx: Context, rate: Floats) -> Floats:
    """A micro-batch begins with reading its rows of a token table in host memory; nothing overlaps that."""
    at, work = ctx.at, ctx.workload
    tokens = at.microbatch_sequences * work.sequence_length / at.cp
    return at.offloads("embedding") * tokens * work.working_bytes * work.model.width / rate
