"""Memory by formula, for what the trace's table does not have.

Layouts with `regather`, etp or ep_overlap, compute in fp32, adapters, dropout; and runs of other frameworks,
which `published/` prices with the same items. A formula is an estimate: margins.py says how far it may be
off.
"""

import numpy as np

from meshwright.plan.framework import Framework
from meshwright.plan.memory.activations import block_input_bytes
from meshwright.plan.memory.in_flight import in_flight
from meshwright.plan.memory.rank_parameters import (
    Items,
    RankParameters,
    column,
    is_v_shaped,
)
from meshwright.plan.workload.layouts import CP_KINDS, FULL, Floats, Layouts
from meshwright.plan.workload.operators import expert_tokens
from meshwright.plan.workload.schedules import SCHEDULES, SPLIT_BACKWARD
from meshwright.plan.workload.workload import Workload

SPLIT_KEPT = 1.8


def formula_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters, state: Items) -> Items:
    """Items of every layout, the state included."""
    items = dict(state)
    items["gathered"] = _gathered_bytes(work, at, stack, rank)
    items.update(_activation_items(work, at, stack, rank))
    items["logits"] = _logit_bytes(work, at, stack)
    if work.adapters is not None and stack.is_traced:
        # The head's backward ends before a layer is recomputed: the larger of the two counts.
        is_full = ((at.recompute & FULL) > 0)[:, None]
        beyond = np.maximum(items["working set"] - items["logits"], 0.0)
        items["working set"] = np.where(is_full, beyond, items["working set"])
    items["exchange"] = _exchange_bytes(work, at)
    return items


def _gathered_bytes(work: Workload, at: Layouts, stack: Framework, rank: RankParameters) -> Floats:
    """Unsharded weights and gradients that ZeRO-3 (and 2) keep for a while; with a pipeline, for the step."""
    unit = rank.largest_unit
    trained = 0.0 if work.adapters else 1.0
    at_once = unit * (2.0 * stack.state.gather + trained * (stack.state.gather + stack.state.reduce))
    scatter = trained * unit * (stack.state.gather + stack.state.reduce)
    each = at.scatters_each(in_pipelines=stack.scatters_in_pipelines)[:, None]
    everything = rank.dense + np.where(column(stack.expert_shards(at)) > 1, rank.experts, 0.0)
    gradients = np.where(each, scatter, everything * trained * stack.state.reduce)
    gather = stack.state.gather
    if work.adapters is not None and stack.is_traced:
        gather = min(gather, work.adapters.base_bits / 8.0)
    sharded = np.where((at.pp > 1)[:, None], everything * gather + gradients, at_once)
    shards = (at.shards > 1)[:, None]
    zero = at.zero[:, None]
    return np.where(shards & (zero == 3), sharded, np.where(shards & (zero == 2), scatter, 0.0))


def _activation_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters) -> Items:
    counts = work.counts
    share = counts.num_moe_layers / work.model.num_layers
    dense = stack.layer_activation_bytes(work, at, moe=False) if share < 1 else 0.0
    routed = stack.layer_activation_bytes(work, at, moe=True) if share > 0 else 0.0
    per_layer = column((1.0 - share) * dense + share * routed)
    kept = stack.kept_parts(work, at, moe=share > 0.5)
    whole = sum(kept.values())
    recomputed = np.asarray(whole) + _gradient_bytes(work, at, stack, kept) + _unpacked_bytes(work, at)
    norms = _norm_bytes(work, at, moe=share > 0.5)
    working = np.where((at.recompute & FULL) > 0, recomputed, 0.25 * np.asarray(whole))
    # Of DoRA's gradients, those of one more output of each linear live at once, unless blocks are compiled.
    working = working + norms + (0.0 if work.compiled else kept.get("magnitudes", 0.0))
    flight = in_flight(at)
    items = {
        "activations": _until_weight_pass(work, at) * flight * rank.layers * per_layer,
        "working set": column(working) * np.ones((1, 3)),
    }
    if cast_bytes := stack.cast_weight_bytes(work):
        each = cast_bytes * rank.layers * rank.layer
        dropped = (at.zero == 3) | ((at.recompute & FULL) > 0)
        items["cast weights"] = np.where(dropped[:, None], 0.0, flight * each)
    return {**items, **fp8_weight_items(work, at, rank)}


def _gradient_bytes(work: Workload, at: Layouts, stack: Framework, kept: Items) -> Floats:
    """Gradients of the MLP's inner matmuls and of the residual stream, beside the recomputed layer.

    Counted with adapters: in long sequences on one card they decide what fits, as the trace shows.
    """
    if work.adapters is None or not stack.is_traced:
        return np.zeros(len(at))
    return kept["inner"] + block_input_bytes(work, at)


def _unpacked_bytes(work: Workload, at: Layouts) -> Floats:
    """What a pass writes of packed experts: a projection dequantised from NF4, or transposed in fp8.

    Those of single matrices are much smaller than the activations beside them, and are left out.
    """
    if work.adapters is None or work.adapters.packed_bits is None:
        return np.zeros(len(at))
    each = 1.0 if work.is_low_precision else work.working_bytes
    return each * work.counts.experts_layer / 3.0 / (at.ep * at.etp)


def _until_weight_pass(work: Workload, at: Layouts) -> Floats:
    """The factor on kept tensors of adapters where backward is split: the weight pass, which comes later,
    needs their inputs and the gradients of their outputs. Traces have 1.2 to 2.2 times as much."""
    is_split = np.isin(np.asarray(SCHEDULES)[at.schedule], sorted(SPLIT_BACKWARD)) & (at.pp > 1)
    return column(np.where(is_split & (work.adapters is not None), SPLIT_KEPT, 1.0))


def _norm_bytes(work: Workload, at: Layouts, *, moe: bool) -> Floats:
    """The copy in fp32 of the largest matrix of a layer, or of all experts', whose norms DoRA takes."""
    adapters = work.adapters
    if adapters is None or not adapters.is_dora or adapters.base_bits > 16:
        return np.zeros(len(at))
    model = work.model
    widest = max(model.mlp.width, model.attention.num_heads * model.attention.head_width)
    one = work.counts.experts_layer / 3.0 / (at.ep * at.etp) if moe else model.width * widest / at.tp
    return 4.0 * one


def fp8_weight_items(work: Workload, at: Layouts, rank: RankParameters) -> Items:
    """Weights that are cast to fp8 once per update and kept, as they lie and transposed."""
    if not (work.is_low_precision and work.keeps_low_precision_weights):
        return {}
    counts = work.counts
    share = counts.num_moe_layers / work.model.num_layers
    matrices = (1.0 - share) * counts.dense_layer + share * counts.moe_layer
    experts = share * counts.experts_layer if work.low_precision_experts else 0.0
    on_rank = matrices / at.tp + experts / (at.ep * at.etp)
    return {"fp8 weights": 2.0 * work.low_precision_layers * rank.layers * column(on_rank)}


def _logit_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Logits and what the loss makes of them where the head is; the embedding's output on the first rank."""
    tokens = at.microbatch_tokens(work.sequence_length)
    logits = stack.logit_bytes(work, at)
    embedded = work.working_bytes * stack.residual_tokens(tokens, at.tp) * work.model.width
    alone, is_v = at.pp == 1, is_v_shaped(at)
    first = np.where(alone | is_v, logits, embedded)
    return np.stack([first, np.where(alone, logits, 0.0), np.where(is_v, 0.0, logits)], axis=1)


def _exchange_bytes(work: Workload, at: Layouts) -> Floats:
    """Keys and values in flight over cp, receive buffers of the pipeline, and what `ep_overlap` adds."""
    attention = work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    kv = 2.0 * attention.num_kv_heads * attention.head_width / at.tp * work.working_bytes * tokens
    gathers = at.cp_kind == CP_KINDS.index("gather")
    over_cp = np.where(at.cp > 1, np.where(gathers, at.cp * kv, 4.0 * kv), 0.0)
    hop = np.where(at.pp > 1, 2.0 * work.working_bytes * tokens * work.model.width / at.tp, 0.0)
    return column(over_cp + hop + _overlap_bytes(work, at)) * np.ones((1, 3))


def _overlap_bytes(work: Workload, at: Layouts) -> Floats:
    """Output of the shared experts beside the routed ones (shared), or rows of both halves (halves)."""
    if work.model.moe is None:
        return np.zeros(len(at))
    row = work.working_bytes * work.model.width
    shared = row * at.microbatch_tokens(work.sequence_length) / at.tp
    return np.choose(at.ep_overlap, (np.zeros(len(at)), shared, row * expert_tokens(work, at)))


def movable_activation_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Bytes of the mean layer and one micro-batch that offload of activations moves: all that it keeps."""
    share = work.counts.num_moe_layers / work.model.num_layers
    moved = np.zeros(len(at))
    for moe, part in ((False, 1.0 - share), (True, share)):
        if part:
            moved = moved + part * stack.layer_activation_bytes(work, at, moe=moe)
    return moved
