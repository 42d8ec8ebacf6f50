"""Model FLOPs per token, by the one convention that MFU uses everywhere.

FLOPs per token = 6 x (parameters in matmuls, head in, embedding lookup out)
                + 6 x layers x attention width x sequence

The 6 is forward (2: a multiply and an add) plus backward (4). Attention multiplies queries with keys and
scores with values, 2 x 2 x width x keys seen forward, so 12 with the backward pass; a causal query sees half
of the sequence on average, which leaves 6. With a sliding window it sees less. Of routed experts only the
chosen ones count. Recomputed FLOPs never count (that is HFU).
"""

from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import num_matmul_parameters


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward and backward FLOPs of one token in a sequence of this length."""
    return 6.0 * num_matmul_parameters(model) + attention_flops_per_token(model, sequence_length)


def attention_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """FLOPs per token that grow with the sequence: causal query-key and score-value matmuls."""
    attention = model.attention
    pair_width = attention.num_heads * (attention.head_width + attention.value_width)
    keys_seen = mean_keys_seen(sequence_length, attention.window)
    return 6.0 * model.num_layers * pair_width * keys_seen


def mean_keys_seen(sequence_length: float, window: int | None = None) -> float:
    """Mean number of keys that a causal query sees: half of the sequence, less with a window.

    This is the triangle of the first `window` queries plus the band of all later ones, over the sequence. The
    diagonal counts half, so that the mean without a window is exactly sequence / 2.
    """
    width = min(window or sequence_length, sequence_length)
    return width - width * width / (2.0 * sequence_length)
