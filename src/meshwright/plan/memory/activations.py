"""Bytes that one layer keeps of one micro-batch for its backward pass, by what a policy may drop."""

import numpy as np

from meshwright.plan.framework import Framework
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
    Layouts,
)
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]


def layer_activation_bytes(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> Floats:
    """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
    kept = kept_parts(work, at, stack, moe=moe)
    bits = at.recompute

    def unless(part: int, value: Floats) -> Floats:
        return np.where((bits & part) > 0, 0.0, value)

    # A narrow recipe keeps the cast output of the norm for the weight gradient, recomputed or not.
    keeps_cast = work.is_low_precision and not stack.recasts_inputs
    norms = kept["norms"] if keeps_cast else unless(NORMS, kept["norms"])
    partial = kept["inputs"] + norms + kept["attention"]
    partial = partial + unless(CORE_ATTENTION, kept["scores"])
    partial = partial + unless(NORMS, kept["rotations"] + kept["mask"])
    inner = kept["inner"] + unless(ACTIVATION, kept["activation"])
    partial = partial + unless(EXPERTS if moe else MLP, inner)
    if stack.keeps_matmul_outputs:
        outputs = 2.0 * work.working_bytes * at.microbatch_tokens(work.sequence_length) * work.model.width
        partial = partial + np.where((bits & NORMS) > 0, outputs - kept["inputs"] / 2.0, 0.0)
    none = sum(kept.values())
    with_policy = np.where((bits & FULL) > 0, block_input_bytes(work, at, stack), partial)
    return none + (with_policy - none) / at.recompute_every  # pyright: ignore[reportReturnType]


def block_input_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """What a layer is given of one micro-batch, and all that full recompute keeps of it."""
    tokens = at.microbatch_tokens(work.sequence_length)
    return work.working_bytes * tokens * work.model.width / (at.tp if stack.sequence_parallel else 1)


def kept_parts(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> Items:
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
    residual = block_input_bytes(work, at, stack)
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
    # What a mask adds to scores, where one call of attention sees the whole sequence.
    is_whole = (at.cp == 1) | (at.cp_kind == CP_KINDS.index("ulysses"))
    pairs = float(work.sequence_length) ** 2 * (at.microbatch_sequences if work.separate_documents else 1.0)
    mask = np.where(is_whole & (stack.keeps_masks and work.has_mask), width * pairs, 0.0)
    inner, activation = _inner_bytes(work, at, stack, moe=moe)
    parts = {
        "inputs": 2.0 * stream,
        "norms": 2.0 * gathered + masks,
        "attention": core,
        "rotations": rotations,
        "scores": scores,
        "mask": mask,
        "inner": inner,
        "activation": activation,
    }
    return _in_8_bits(work, at, parts, moe=moe) if work.is_low_precision and stack.recasts_inputs else parts


def _in_8_bits(work: Workload, at: Layouts, parts: Items, *, moe: bool) -> Items:
    """The same where linears keep their inputs in 8 bits: of norms, of attention (beside the kernel's own
    copy), and the MLP's product, which a compiled block makes again from what it has."""
    share, attention = work.low_precision_layers, work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    product = 1.0 if moe and not work.low_precision_experts else 0.0 if work.compiled else 0.5
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


def movable_activation_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """Bytes of the mean layer and one micro-batch that offload of activations moves: all that it keeps."""
    share = work.counts.num_moe_layers / work.model.num_layers
    moved = np.zeros(len(at))
    for moe, part in ((False, 1.0 - share), (True, share)):
        if part:
            moved = moved + part * layer_activation_bytes(work, at, stack, moe=moe)
    return moved


def kept_over_cp(work: Workload, at: Layouts) -> Floats:
    """What a kind of cp keeps beside its own rows: all keys and values, or the output in both layouts."""
    attention = work.model.attention
    tokens = at.microbatch_tokens(work.sequence_length) * work.working_bytes / at.tp
    keys = tokens * attention.num_kv_heads * (attention.head_width + attention.value_width)
    output = tokens * attention.num_heads * attention.value_width
    kind = np.asarray(CP_KINDS)[at.cp_kind]
    exchanged = np.where(np.isin(kind, ("ulysses", "hierarchical")), output, 0.0)
    return np.where(at.cp > 1, np.where(kind == "gather", (at.cp - 1) * keys, exchanged), 0.0)
