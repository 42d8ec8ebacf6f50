"""What a decoder is made of, in numbers. A family (`spec/families.py`) is one value of `ModelSpec`."""

from typing import Literal

from meshwright.spec.base import Fraction, NonNegative, Number, Positive, PositiveNumber, Spec


class RopeScalingSpec(Spec):
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """Which published stretch."""
    factor: PositiveNumber
    """Times longer than the original positions."""
    original_positions: Positive = 8192
    """llama3 and yarn: the length the frequencies were first trained on."""
    low_frequency_factor: PositiveNumber = 1.0
    """llama3 only."""
    high_frequency_factor: PositiveNumber = 4.0
    """llama3 only."""
    beta_fast: PositiveNumber = 32.0
    """yarn only."""
    beta_slow: PositiveNumber = 1.0
    """yarn only."""
    mscale: Number = 0.0
    """yarn only: attention temperature, numerator."""
    mscale_all_dims: Number = 0.0
    """yarn only: attention temperature, denominator; also scales the softmax (DeepSeek)."""


class RopeSpec(Spec):
    """Rotary positions."""

    theta: PositiveNumber = 10000.0
    """Base of the geometric series of wavelengths."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i+1) instead of halves (i, i + width/2)."""
    scaling: RopeScalingSpec | None = None


class LatentSpec(Spec):
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through low ranks."""

    query_rank: Positive | None = None
    """None: queries are projected directly (V2-Lite)."""
    kv_rank: Positive
    """Width of the latent that keys and values are made from."""
    nope_width: Positive
    """Width per head of the part that carries no position."""
    rope_width: Positive
    """Width per head of the rotary part; its key is shared by all heads."""
    value_width: Positive
    """Width per head of the values."""


class AttentionSpec(Spec):
    """Causal attention; MHA, GQA and MQA differ only in `num_kv_heads`."""

    num_heads: Positive
    """Query heads."""
    num_kv_heads: Positive
    """Key/value heads; as many as num_heads is MHA, one is MQA, between is GQA."""
    head_width: Positive
    """Width of one query head; with `latent` it is nope_width + rope_width."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """A bias on the projection back into the residual stream."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen 3)."""
    window: Positive | None = None
    """Sliding window: a query sees itself and window - 1 tokens before it."""
    latent: LatentSpec | None = None
    dropout: Fraction = 0.0
    """On the attention probabilities (GPT-2)."""

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.latent.value_width if self.latent else self.head_width


class MlpSpec(Spec):
    """The feed-forward part of a dense layer."""

    kind: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """swiglu has a gate and three matrices; gelu and gelu_tanh (its approximation) two."""
    width: Positive
    """Inner width (feed-forward size)."""
    bias: bool = False
    """Biases on its projections."""

    @property
    def num_matrices(self) -> int:
        """Three with a gate, two without."""
        return 3 if self.kind == "swiglu" else 2


class MoeSpec(Spec):
    """Routed experts (SwiGLU) in place of the dense MLP."""

    num_experts: Positive
    """Routed experts per layer."""
    top_k: Positive
    """Experts that each token is sent to."""
    width: Positive
    """Inner width of one routed expert."""
    shared_width: NonNegative = 0
    """Inner width of the always-active shared expert(s) together; 0 means none."""
    first_dense_layers: NonNegative = 0
    """This many layers at the bottom keep the dense MLP (DeepSeek)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become weights."""
    normalise_top_k: bool = True
    """Weights of the chosen experts are made to sum to one."""
    routed_scale: PositiveNumber = 1.0
    """Factor on the routed output (DeepSeek)."""
    num_groups: Positive = 1
    """Experts are chosen inside the best `top_groups` of this many groups."""
    top_groups: Positive = 1
    """Groups that a token may choose from."""
    group_score: Literal["max", "top2_sum"] = "max"
    """A group counts by its best expert, or by the sum of its best two."""
    aux_loss: Number = 0.0
    """Coefficient of the load-balancing loss, taken per sequence and divided by the number of sequences."""
    balance_bias_rate: Number = 0.0
    """Step of the bias-based balancing that needs no loss; 0 leaves the bias where it is."""
    has_balance_bias: bool = False
    """A per-expert bias is added to the scores for choosing, not for weighting (DeepSeek-V3)."""
    capacity_factor: PositiveNumber | None = None
    """None is dropless; else an expert takes at most factor x S x top_k / num_experts tokens per sequence."""


class ModelSpec(Spec):
    """A decoder-only transformer."""

    family: str = "custom"
    """The name shown to people; nothing is decided by it."""
    vocab_size: Positive
    """Rows of the embedding table; padding for speed or for tp is counted in."""
    num_layers: Positive
    """Transformer blocks."""
    width: Positive
    """The residual stream (hidden size)."""
    max_positions: Positive
    """Longest sequence the model is meant for."""
    attention: AttentionSpec
    mlp: MlpSpec
    moe: MoeSpec | None = None
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: PositiveNumber = 1e-5
    """Added to the mean square before the root."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary, or a learned table."""
    rope: RopeSpec | None = None
    """Present exactly when positions is `rope`."""
    tied_head: bool = False
    """The output head is the embedding table."""
    dropout: Fraction = 0.0
    """On embeddings and on the output of each attention and MLP."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of initial weights."""
    scaled_residual_init: bool = True
    """Projections into the residual stream start smaller by sqrt(2 x num_layers)."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer has routed experts instead of a dense MLP."""
        return self.moe is not None and layer >= self.moe.first_dense_layers
