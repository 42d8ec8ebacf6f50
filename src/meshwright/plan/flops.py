"""Model FLOPs per token, by the one convention that MFU uses everywhere.

FLOPs per token = 6 x (parameters in matmuls, head in, embedding lookup out)
                + 6 x layers x attention width x sequence

The 6 is forward (2: a multiply and an add) plus backward (4). Attention multiplies queries with
keys and weights with values, 2 x 2 x width x keys seen forward, so 12 with the backward pass; a
causal query sees half of the sequence on average, which leaves 6. A sliding window sees less.
Of routed experts only the chosen ones count. Recomputed work never counts (that is HFU).
"""

from meshwright.spec.model import AttentionSpec, ModelSpec


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward and backward FLOPs of one token in a sequence of this length."""
    return 6.0 * matmul_parameters(model) + attention_flops_per_token(model, sequence_length)


def attention_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """The part that grows with the sequence: query-key and weight-value products, causal."""
    attention = model.attention
    pair_width = attention.num_heads * (attention.head_width + attention.value_width)
    keys_seen = mean_keys_seen(sequence_length, attention.window)
    return 6.0 * model.num_layers * pair_width * keys_seen


def mean_keys_seen(sequence_length: int, window: int | None = None) -> float:
    """Keys a causal query sees, averaged over the sequence: half of it, less with a window.

    The triangle of the first `window` queries plus the band of all later ones, over the sequence;
    the diagonal counts half, so that no window gives exactly sequence / 2.
    """
    width = min(window or sequence_length, sequence_length)
    return width - width * width / (2.0 * sequence_length)


def matmul_parameters(model: ModelSpec) -> int:
    """Parameters a token is multiplied with: projections, MLP or its chosen experts, router, head."""
    attention = model.num_layers * attention_matmul_parameters(model.attention, model.width)
    feed_forward = sum(_feed_forward(model, layer) for layer in range(model.num_layers))
    return attention + feed_forward + model.vocab_size * model.width


def attention_matmul_parameters(attention: AttentionSpec, width: int) -> int:
    """Query, key, value and output projections of one layer."""
    output = attention.num_heads * attention.value_width * width
    if attention.latent is None:
        projected_heads = attention.num_heads + 2 * attention.num_kv_heads
        return projected_heads * attention.head_width * width + output
    latent = attention.latent
    query_width = attention.num_heads * attention.head_width
    rank = latent.query_rank
    query = width * query_width if rank is None else rank * (width + query_width)
    compress = width * (latent.kv_rank + latent.rope_width)
    expand = latent.kv_rank * attention.num_heads * (latent.nope_width + latent.value_width)
    return query + compress + expand + output


def _feed_forward(model: ModelSpec, layer: int) -> int:
    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        return model.mlp.num_matrices * model.width * model.mlp.width
    active_width = moe.top_k * moe.width + moe.shared_width
    return 3 * model.width * active_width + model.width * moe.num_experts
