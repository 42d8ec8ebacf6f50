"""Bytes that one layer keeps of one micro-batch for its backward pass, by what a policy may drop.

The functions of more than one part are building blocks: `published/peer_memory.py` puts them together in the
way of other frameworks.
"""

import numpy as np

from meshwright.plan.workload import operators
from meshwright.plan.workload.layouts import (
    ACTIVATION,
    CP_KINDS,
    EXPERTS,
    FULL,
    MLP,
    NORMS,
    Floats,
    Layouts,
)
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]
RESIDUAL_BYTES = 4.0
"""Bytes per element that uncompiled norms save of the residual stream in mixed precision."""


def layer_activation_bytes(work: Workload, at: Layouts, *, moe: bool) -> Floats:
    """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
    kept = kept_parts(work, at, moe=moe)
    partial = kept["inputs"] + unless(at, NORMS, kept["norms"]) + kept["attention"]
    partial = partial + unless(at, NORMS, kept["mask"]) + kept_of_mlp(at, kept, moe=moe)
    # Selective recompute keeps the output of every matmul, also partial sums before a reduce-scatter.
    outputs = 2.0 * work.working_bytes * at.microbatch_tokens(work.sequence_length) * work.model.width
    outputs = outputs + _apart_adapter_bytes(work, at, moe=moe)
    partial = partial + np.where((at.recompute & NORMS) > 0, outputs - kept["inputs"] / 2.0, 0.0)
    return after_recompute(at, kept, partial, block_input_bytes(work, at))


def _apart_adapter_bytes(work: Workload, at: Layouts, *, moe: bool) -> Floats:
    """What selective recompute keeps of adapters: outputs of their own matmuls, as large as their linears'.

    The matmul of a frozen linear adds its adapter in compiled blocks whose weights are not sharded, and
    always where it is NF4; with dropout and in DoRA it never does, and with both it runs twice.
    """
    adapters = work.adapters
    if adapters is None:
        return np.zeros(len(at))
    is_nf4 = adapters.packed_bits is not None and adapters.packed_bits < 8.0
    is_sharded = (at.tp > 1) | (at.zero == 3) | (at.offloads("parameters") > 0)
    is_apart = adapters.is_apart | ((is_sharded | (not work.compiled)) & (not is_nf4))
    outputs = _adapted_output_bytes(work, at, moe=moe, has_experts=adapters.has_dropout)
    return np.where(is_apart, (2.0 if adapters.repeats_frozen else 1.0) * outputs, 0.0)


def _adapted_output_bytes(work: Workload, at: Layouts, *, moe: bool, has_experts: bool) -> Floats:
    """Outputs of the linears of a layer, and of its routed experts, which have adapters."""
    dense = [] if moe else operators.mlp_matmuls(work, at)
    routed = operators.moe_matmuls(work, at) if moe and has_experts else []
    matmuls = [*operators.attention_matmuls(work, at), *dense, *routed]
    elements = sum((one.groups * one.m * one.n for one in matmuls if one.name != "router"), np.zeros(len(at)))
    return work.working_bytes * elements


def unless(at: Layouts, part: int, value: Floats) -> Floats:
    """The bytes of a part, and none where its recompute policy drops them."""
    return np.where((at.recompute & part) > 0, 0.0, value)


def kept_of_mlp(at: Layouts, kept: Items, *, moe: bool) -> Floats:
    """What recompute of activation functions, or of the whole MLP, leaves of it."""
    inner = kept["inner"] + unless(at, ACTIVATION, kept["activation"])
    return unless(at, EXPERTS if moe else MLP, inner)


def after_recompute(at: Layouts, kept: Items, partial: Floats, block_input: Floats) -> Floats:
    """All parts, what a policy leaves of them, or the block's input alone; every n-th layer recomputes."""
    none = sum(kept.values())
    with_policy = np.where((at.recompute & FULL) > 0, block_input, partial)
    return none + (with_policy - none) / at.recompute_every  # pyright: ignore[reportReturnType]


def block_input_bytes(work: Workload, at: Layouts) -> Floats:
    """What a layer is given of one micro-batch, and all that full recompute keeps of it."""
    is_fp32 = work.adapters is not None and work.adapters.has_fp32_stream
    width = max(work.working_bytes, 4.0) if is_fp32 else work.working_bytes
    return width * at.microbatch_tokens(work.sequence_length) * work.model.width / at.tp


def kept_parts(work: Workload, at: Layouts, *, moe: bool) -> Items:
    """What the backward pass of one layer needs, by the part that a recompute policy may drop.

    16-bit elements per token: layer inputs 2h (before each norm), norm outputs 2h, queries, keys, values
    and the attention output, and of the MLP its two inner matmuls, the activation's output and the gated
    one. Gathered inputs of column-parallel linears are full on every rank of tp.
    """
    model, width = work.model, work.working_bytes
    tokens, given = at.microbatch_tokens(work.sequence_length), block_input_bytes(work, at)
    residual = width * tokens * model.width / at.tp
    gathered = np.where(at.regather == 1, residual, width * tokens * model.width)
    stream = residual if work.compiled else np.maximum(RESIDUAL_BYTES, width) / width * residual
    made = 1.0 if work.compiled else 2.0
    inner, activation = inner_bytes(work, at, moe=moe, made=made)
    parts = {
        "inputs": 2.0 * stream + given - residual,
        "norms": 2.0 * gathered + dropout_mask_bytes(work, tokens / at.tp),
        "attention": attention_bytes(work, at),
        "mask": _mask_bytes(work, at),
        "inner": inner,
        "activation": activation,
    }
    if work.adapters is not None and work.adapters.is_dora:
        # What the magnitude multiplies, for its gradient.
        parts["magnitudes"] = _adapted_output_bytes(work, at, moe=moe, has_experts=True)
    # Frozen linears keep no input, and the adapters beside them keep theirs in 16 bits.
    is_in_8_bits = work.is_low_precision and work.adapters is None
    return _in_8_bits(work, at, parts, moe=moe) if is_in_8_bits else parts


def attention_bytes(work: Workload, at: Layouts) -> Floats:
    """Queries, keys, values, the output and the log-sums of attention."""
    attention, tokens = work.model.attention, at.microbatch_tokens(work.sequence_length)
    heads = attention.num_heads * (attention.head_width + attention.value_width)
    kv = attention.num_kv_heads * (attention.head_width + attention.value_width)
    return work.working_bytes * tokens * (heads + kv) / at.tp + 4.0 * tokens * attention.num_heads / at.tp


def dropout_mask_bytes(work: Workload, tokens: Floats) -> Floats:
    """One byte per dropped element, behind attention and behind the MLP."""
    return 2.0 * tokens * work.model.width if work.model.dropout > 0 else 0.0 * tokens


def _mask_bytes(work: Workload, at: Layouts) -> Floats:
    """What a mask adds to scores, where one call of attention sees the whole sequence."""
    is_whole = (at.cp == 1) | (at.cp_kind == CP_KINDS.index("ulysses"))
    pairs = float(work.sequence_length) ** 2 * (at.microbatch_sequences if work.separate_documents else 1.0)
    return np.where(is_whole & work.has_mask, work.working_bytes * pairs, 0.0)


def _in_8_bits(work: Workload, at: Layouts, parts: Items, *, moe: bool) -> Items:
    """The same where linears keep their inputs in 8 bits: of norms, of attention (beside the kernel's own
    copy), and the gated output of the MLP, which a compiled block recomputes from what it has."""
    share, attention = work.low_precision_layers, work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    keeps_bf16 = moe and (not work.low_precision_experts or work.bf16_expert_gradients)
    gated = 1.0 if keeps_bf16 else 0.0 if work.compiled else 0.5
    return {
        **parts,
        "norms": (1.0 - 0.5 * share) * parts["norms"],
        "attention": parts["attention"]
        + share * tokens * attention.num_heads * attention.value_width / at.tp,
        "activation": (1.0 - (1.0 - gated) * share) * parts["activation"],
    }


def inner_bytes(work: Workload, at: Layouts, *, moe: bool, made: float) -> tuple[Floats, Floats]:
    """Bytes of the MLP's inner tensors: outputs of its matmuls, and `made` tensors of its activation."""
    model, width = work.model, work.working_bytes
    tokens = at.microbatch_tokens(work.sequence_length)
    if not moe or model.moe is None:
        elements = tokens * model.mlp.width / at.tp
        into = model.mlp.num_matrices - 1
        return width * into * elements, width * (made if into == 2 else 1.0) * elements
    routed = operators.expert_tokens(work, at)
    inner = routed * model.moe.width / at.etp + tokens * model.moe.shared_width / at.tp
    dispatched = width * 2.0 * routed * model.width + 8.0 * tokens / at.tp * model.moe.num_experts
    return width * 2.0 * inner + dispatched, width * made * inner
