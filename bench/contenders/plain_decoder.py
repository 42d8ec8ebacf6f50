"""A decoder in plain torch: the reference without a framework.

GPT-2 and Llama shapes, fused QKV projection, torch's own norms and attention (with separate documents flex
attention and a block mask), cross-entropy over full fp32 logits.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from meshwright.spec import ModelSpec


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        attention, mlp = spec.attention, spec.mlp
        self.heads, self.groups = attention.num_heads, attention.num_kv_heads
        self.head_width = attention.head_width
        projected = (self.heads + 2 * self.groups) * self.head_width
        self.attention_norm, self.mlp_norm = norm(spec), norm(spec)
        self.qkv = nn.Linear(spec.width, projected, bias=attention.qkv_bias)
        self.output = nn.Linear(self.heads * self.head_width, spec.width, bias=attention.output_bias)
        self.gate = nn.Linear(spec.width, mlp.width, bias=mlp.bias) if mlp.kind == "swiglu" else None
        self.up = nn.Linear(spec.width, mlp.width, bias=mlp.bias)
        self.down = nn.Linear(mlp.width, spec.width, bias=mlp.bias)

    def forward(self, x: Tensor, rope: Tensor | None, documents: BlockMask | None) -> Tensor:
        x = x + self.attend(self.attention_norm(x), rope, documents)
        h = self.mlp_norm(x)
        inner = (
            functional.silu(self.gate(h)) * self.up(h)
            if self.gate
            else functional.gelu(self.up(h), approximate="tanh")
        )
        return x + self.down(inner)

    def attend(self, x: Tensor, rope: Tensor | None, documents: BlockMask | None) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.groups, self.groups), dim=1)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        gqa = self.heads != self.groups
        if documents is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        else:
            out = flex_attention(q, k, v, block_mask=documents, enable_gqa=gqa)
        return self.output(out.transpose(1, 2).flatten(2))


class PlainDecoder(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, spec: ModelSpec, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.width)
        self.positions = nn.Embedding(spec.max_positions, spec.width) if spec.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = norm(spec)
        self.head = nn.Linear(spec.width, spec.vocab_size, bias=False)
        if spec.tied_head:
            self.head.weight = self.tokens.weight
        self.register_buffer("rope", rope_cos_sin(spec, length), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        rope, documents = self.rope, None
        if positions is not None:  # they restart in each document
            documents = document_mask(positions)
            rope = None if rope is None else rope[:, positions].unsqueeze(2)
        if self.positions is not None:
            x = x + self.positions(
                torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            )
        for block in self.blocks:
            x = block(x, rope, documents)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def document_mask(positions: Tensor) -> BlockMask:
    """A causal block mask in which a document sees itself only."""
    document = (positions == 0).cumsum(1)

    def is_seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[row, query] == document[row, key])

    rows, length = positions.shape
    return create_block_mask(is_seen, rows, None, length, length, device=positions.device)


def norm(spec: ModelSpec) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
    return kind(spec.width, eps=spec.norm_eps)


def rope_cos_sin(spec: ModelSpec, length: int) -> Tensor | None:
    """Cosine and sine of every position, stacked: (2, length, head_width / 2); None without rope."""
    if spec.rope is None:
        return None
    width, scaling = spec.attention.head_width, spec.rope.scaling
    frequency = spec.rope.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is not None:  # Llama 3 scaling: low frequencies are divided, those in between are blended
        periods = scaling.original_positions * frequency / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unscaled = ((periods - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / scaling.factor)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope[0], rope[1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups with weight decay on matrices only, as all contenders have it."""
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
