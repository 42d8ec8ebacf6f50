"""Rules about the model alone."""

from collections.abc import Iterator
from math import isqrt

from meshwright.errors import SpecError
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def rope_needs_rotary_positions(run: RunSpec) -> Violations:
    """`model.rope` is set exactly when `model.positions` is `rope`."""
    model = run.model
    if model.positions == "rope" and model.rope is None:
        hint = "add model.rope, such as {theta: 500000}, or set model.positions=learned"
        yield SpecError("positions=rope without model.rope", where="model.rope", hint=hint)
    if model.positions == "learned" and model.rope is not None:
        hint = "set model.rope=null, or model.positions=rope"
        yield SpecError("positions=learned with model.rope", where="model.rope", hint=hint)


def rotary_width_is_even(run: RunSpec) -> Violations:
    """Rope rotates pairs, so the width that it rotates is even."""
    attention = run.model.attention
    width = attention.latent.rope_width if attention.latent else attention.head_width
    where = "model.attention.latent.rope_width" if attention.latent else "model.attention.head_width"
    if run.model.positions == "rope" and width % 2:
        yield SpecError(
            f"rope rotates pairs, and the width {width} is odd", where=where, hint="use an even width"
        )


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return max(d for d in (*small, *(number // d for d in small)) if d <= most)


def kv_heads_divide_heads(run: RunSpec) -> Violations:
    """Every key/value head serves the same number of query heads."""
    attention = run.model.attention
    if attention.num_heads % attention.num_kv_heads:
        fact = f"num_kv_heads={attention.num_kv_heads} does not divide num_heads={attention.num_heads}"
        fitting = _largest_divisor(attention.num_heads, attention.num_kv_heads)
        hint = (
            f"set model.attention.num_kv_heads={fitting}; any divisor of num_heads will do "
            "(all of them: MHA, one: MQA)"
        )
        yield SpecError(fact, where="model.attention.num_kv_heads", hint=hint)


def latent_widths_add_up(run: RunSpec) -> Violations:
    """With latent attention a head is its part without rope plus its part with rope."""
    attention, latent = run.model.attention, run.model.attention.latent
    if latent is None:
        return
    width = latent.nope_width + latent.rope_width
    if attention.head_width != width:
        fact = f"head_width={attention.head_width}, but nope_width + rope_width = {width}"
        yield SpecError(fact, where="model.attention.head_width", hint=f"use head_width={width}")


def latent_attention_is_rotary_and_full(run: RunSpec) -> Violations:
    """Latent attention has one key/value head per query head, rope, and norms on its latents."""
    attention = run.model.attention
    if attention.latent is None:
        return
    if attention.num_kv_heads != attention.num_heads:
        fact = (
            f"latent attention with num_kv_heads={attention.num_kv_heads} of num_heads={attention.num_heads}"
        )
        hint = f"use num_kv_heads={attention.num_heads}: the latent is what saves memory"
        yield SpecError(fact, where="model.attention.num_kv_heads", hint=hint)
    if run.model.positions != "rope":
        fact = f"latent attention with positions={run.model.positions}"
        yield SpecError(fact, where="model.positions", hint="use positions=rope")
    if attention.qk_norm:
        fact = "qk_norm has no effect on latent attention, which normalises its latents"
        yield SpecError(fact, where="model.attention.qk_norm", hint="set qk_norm=false")


def sequence_fits_positions(run: RunSpec) -> Violations:
    """A sequence is no longer than the model's maximum number of positions."""
    length, positions = run.data.sequence_length, run.model.max_positions
    if length > positions:
        fact = f"sequence_length={length} is longer than max_positions={positions}"
        hint = f"use data.sequence_length={positions} or less, or raise model.max_positions"
        yield SpecError(fact, where="data.sequence_length", hint=hint)


def generated_bytes_fit_vocabulary(run: RunSpec) -> Violations:
    """The generated corpus is bytes and an end-of-document token, so vocab_size is at least 257."""
    if any(source.synthetic for source in run.data.sources) and run.model.vocab_size < 257:
        fact = f"vocab_size={run.model.vocab_size} is too small for bytes and an end-of-document token"
        yield SpecError(fact, where="model.vocab_size", hint="use model.vocab_size=257 or more")


def top_k_experts_exist(run: RunSpec) -> Violations:
    """A token is routed to no more experts than there are."""
    moe = run.model.moe
    if moe is not None and moe.top_k > moe.num_experts:
        fact = f"top_k={moe.top_k} of num_experts={moe.num_experts}"
        yield SpecError(fact, where="model.moe.top_k", hint=f"use top_k={moe.num_experts} or less")


def expert_groups_are_even(run: RunSpec) -> Violations:
    """Expert groups are of equal size, and the chosen groups have at least top_k experts."""
    moe = run.model.moe
    if moe is None or moe.num_groups == 1:
        return
    where = "model.moe.num_groups"
    if moe.num_experts % moe.num_groups:
        fact = f"num_groups={moe.num_groups} does not divide num_experts={moe.num_experts}"
        yield SpecError(fact, where=where, hint="groups are of equal size")
        return
    group_size = moe.num_experts // moe.num_groups
    if moe.top_groups > moe.num_groups:
        fact = f"top_groups={moe.top_groups} of num_groups={moe.num_groups}"
        yield SpecError(fact, where="model.moe.top_groups", hint=f"use top_groups={moe.num_groups} or less")
    if moe.top_k > moe.top_groups * group_size:
        fact = (
            f"top_k={moe.top_k}, but top_groups={moe.top_groups} have {moe.top_groups * group_size} experts"
        )
        yield SpecError(fact, where="model.moe.top_k", hint="use more top_groups or a smaller top_k")
    if moe.group_score == "top2_sum" and group_size < 2:
        fact = f"group_score=top2_sum with {group_size} expert per group"
        yield SpecError(fact, where="model.moe.group_score", hint="use group_score=max")


def dense_layers_leave_experts(run: RunSpec) -> Violations:
    """A mixture of experts has at least one layer with experts."""
    moe = run.model.moe
    if moe is not None and moe.first_dense_layers >= run.model.num_layers:
        fact = f"first_dense_layers={moe.first_dense_layers} of num_layers={run.model.num_layers}: no experts"
        hint = "set model.moe=null, or use fewer dense layers"
        yield SpecError(fact, where="model.moe.first_dense_layers", hint=hint)


def capacity_admits_a_token(run: RunSpec) -> Violations:
    """With a capacity factor, an expert takes at least one token of a sequence."""
    moe = run.model.moe
    if moe is None or moe.capacity_factor is None:
        return
    tokens = moe.capacity_factor * run.data.sequence_length * moe.top_k / moe.num_experts
    if tokens < 1:
        fact = (
            f"capacity_factor={moe.capacity_factor:g} lets an expert take {tokens:.3g} tokens of a sequence"
        )
        hint = "use capacity_factor=1 or more; null never drops a token"
        yield SpecError(fact, where="model.moe.capacity_factor", hint=hint)


def balance_needs_its_bias(run: RunSpec) -> Violations:
    """Bias-based balancing needs has_balance_bias; balancing rates are not negative."""
    moe = run.model.moe
    if moe is None:
        return
    if moe.balance_bias_rate and not moe.has_balance_bias:
        fact = f"balance_bias_rate={moe.balance_bias_rate:g} without has_balance_bias"
        yield SpecError(fact, where="model.moe.balance_bias_rate", hint="set model.moe.has_balance_bias=true")
    for name, value in (("balance_bias_rate", moe.balance_bias_rate), ("aux_loss", moe.aux_loss)):
        if value < 0:
            fact = f"{name}={value:g} would unbalance the experts"
            yield SpecError(fact, where=f"model.moe.{name}", hint="use 0 or more")


MODEL_RULES = [
    rope_needs_rotary_positions,
    rotary_width_is_even,
    kv_heads_divide_heads,
    latent_widths_add_up,
    latent_attention_is_rotary_and_full,
    sequence_fits_positions,
    generated_bytes_fit_vocabulary,
    top_k_experts_exist,
    expert_groups_are_even,
    dense_layers_leave_experts,
    capacity_admits_a_token,
    balance_needs_its_bias,
]
