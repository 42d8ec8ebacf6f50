"""The architecture of a decoder, in numbers. A family (`spec/families.py`) is one value of `ModelSpec`."""

from typing import Literal

from meshwright.spec.base import (
    ExpertCount,
    Fraction,
    LayerCount,
    ModelSize,
    NonNegative,
    Number,
    Positive,
    PositiveNumber,
    Spec,
    VocabSize,
)


class RopeScalingSpec(Spec):
    """Rope scaling: how frequencies change for sequences longer than those of the original training."""

    kind: Literal["linear", "llama3", "yarn"]
    """Scaling method."""
    factor: PositiveNumber
    """Maximum length / original maximum length."""
    original_positions: Positive = 8192
    """llama3 and yarn: the sequence length of the original training."""
    low_frequency_factor: PositiveNumber = 1.0
    """llama3 only: wavelengths above original_positions / this factor are scaled in full."""
    high_frequency_factor: PositiveNumber = 4.0
    """llama3 only: wavelengths below original_positions / this factor are not scaled."""
    beta_fast: PositiveNumber = 32.0
    """yarn only: dims with more rotations than this over the original length are not scaled."""
    beta_slow: PositiveNumber = 1.0
    """yarn only: dims with fewer rotations than this over the original length are scaled in full."""
    mscale: Number = 0.0
    """yarn only: attention temperature, numerator."""
    mscale_all_dims: Number = 0.0
    """yarn only: attention temperature, denominator; also scales the softmax (DeepSeek)."""


class RopeSpec(Spec):
    """Rotary position embeddings (rope)."""

    theta: PositiveNumber = 10000.0
    """Base of the geometric series of wavelengths."""
    interleaved: bool = False
    """Rotated pairs are neighbours (2i, 2i+1) instead of halves (i, i + width/2)."""
    scaling: RopeScalingSpec | None = None


class LatentSpec(Spec):
    """Multi-head latent attention (MLA, DeepSeek): low-rank projections of queries and of keys/values."""

    query_rank: Positive | None = None
    """Rank of the query projection; null projects queries directly (V2-Lite)."""
    kv_rank: ModelSize
    """Rank of the key/value projection: width of the latent."""
    nope_width: ModelSize
    """Width per head of the part without rope."""
    rope_width: ModelSize
    """Width per head of the part with rope; its key is shared by all heads."""
    value_width: ModelSize
    """Width per head of the values."""


class AttentionSpec(Spec):
    """Causal attention; MHA, GQA and MQA differ only in `num_kv_heads`."""

    num_heads: ModelSize
    """Query heads."""
    num_kv_heads: ModelSize
    """Key/value heads; as many as num_heads is MHA, one is MQA, between is GQA."""
    head_width: ModelSize
    """Width of one query head; with `latent` it is nope_width + rope_width."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """A bias on the projection back into the residual stream."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before rope (Qwen 3)."""
    window: Positive | None = None
    """Sliding window: a query sees itself and the window - 1 tokens before it."""
    latent: LatentSpec | None = None
    dropout: Fraction = 0.0
    """Dropout on the attention probabilities (GPT-2)."""

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.latent.value_width if self.latent else self.head_width


class MlpSpec(Spec):
    """The MLP (feed-forward) of a dense layer."""

    kind: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """Activation: swiglu has a gate and three matrices; gelu and gelu_tanh (its approximation) have two."""
    width: ModelSize
    """Inner width (feed-forward size, intermediate size)."""
    bias: bool = False
    """Biases on the projections."""

    @property
    def num_matrices(self) -> int:
        """Three with a gate, two without."""
        return 3 if self.kind == "swiglu" else 2


class MoeSpec(Spec):
    """Mixture of experts: routed experts (SwiGLU) instead of the dense MLP."""

    num_experts: ExpertCount
    """Routed experts per layer."""
    top_k: Positive
    """Experts that each token is routed to."""
    width: ModelSize
    """Inner width of one routed expert."""
    shared_width: NonNegative = 0
    """Inner width of the always-active shared expert(s) together; 0 means none."""
    first_dense_layers: NonNegative = 0
    """Number of first layers that have a dense MLP (DeepSeek)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to routing weights."""
    normalise_top_k: bool = True
    """Normalise the weights of the chosen experts to a sum of one."""
    routed_scale: PositiveNumber = 1.0
    """Factor on the routed output (DeepSeek)."""
    num_groups: Positive = 1
    """Expert groups; experts are chosen from the best `top_groups` of them."""
    top_groups: Positive = 1
    """Groups that the experts of a token are chosen from."""
    group_score: Literal["max", "top2_sum"] = "max"
    """Score of a group: its best expert, or the sum of its best two."""
    aux_loss: Number = 0.0
    """Coefficient of the load-balancing loss, computed per sequence and averaged over sequences."""
    balance_bias_rate: Number = 0.0
    """Step size of bias-based (auxiliary-loss-free) balancing; 0 never changes the bias."""
    has_balance_bias: bool = False
    """Add a per-expert bias to the scores for choosing experts, not for weighting them (DeepSeek-V3)."""
    capacity_factor: PositiveNumber | None = None
    """An expert takes at most factor x S x top_k / num_experts tokens per sequence; null is dropless."""


class ModelSpec(Spec):
    """A decoder-only transformer."""

    family: str = "custom"
    """Display name; it has no effect on the model."""
    vocab_size: VocabSize
    """Rows of the embedding, with padding for speed or for tp."""
    num_layers: LayerCount
    """Transformer blocks."""
    width: ModelSize
    """Width of the residual stream (hidden size, model dim)."""
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
    """Rope, or a learned position embedding."""
    rope: RopeSpec | None = None
    """Rope settings; set exactly when positions is `rope`."""
    tied_head: bool = False
    """The output head shares its weight with the embedding (tied embeddings)."""
    dropout: Fraction = 0.0
    """Dropout on embeddings and on the output of each attention and MLP."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of initial weights."""
    scaled_residual_init: bool = True
    """Divide the initial weights of projections into the residual stream by sqrt(2 x num_layers)."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer has routed experts instead of a dense MLP."""
        return self.moe is not None and layer >= self.moe.first_dense_layers
