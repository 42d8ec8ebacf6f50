"""Every parameter of a decoder, by name and shape, without building it.

The list equals `named_parameters()` of the built `Decoder`: same names, order and shapes. Stacked
routed experts are one tensor per projection with the expert as first dim. A tied head has no tensor
of its own, and the balance bias of a router is a buffer, not a parameter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.spec.model import AttentionSpec, LatentSpec, ModelSpec

ParameterKind = Literal[
    "embedding",
    "position",
    "matrix",
    "expert",
    "router",
    "head",
    "norm",
    "bias",
    "lora_A",
    "lora_B",
    "magnitude",
    "token_rows",
]
# The kinds that are matmul weights: each element does one multiply-add per token.
MATMUL_KINDS = frozenset({"matrix", "expert", "router", "head"})


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name in the module tree, its full shape, its kind, and its layer."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    layer: int | None = None
    """None for parameters outside the blocks."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(model: ModelSpec) -> list[Parameter]:
    """All parameters in the order of the built module."""
    return list(_listed(model))  # pyright: ignore[reportArgumentType]  frozen specs are hashable


@lru_cache(maxsize=8)
def _listed(model: ModelSpec) -> tuple[Parameter, ...]:
    """The planner asks for the list of one model hundreds of times."""
    listed = [Parameter("embedding.tokens.weight", (model.vocab_size, model.width), "embedding")]
    if model.positions == "learned":
        listed.append(Parameter("embedding.positions.weight", (model.max_positions, model.width), "position"))
    for layer in range(model.num_layers):
        listed += layer_parameters(model, layer)
    listed += [Parameter(name, shape, kind) for name, shape, kind in _norm("norm", model)]
    if not model.tied_head:
        listed.append(Parameter("head.weight", (model.vocab_size, model.width), "head"))
    return tuple(listed)


def layer_parameters(model: ModelSpec, layer: int) -> list[Parameter]:
    """The parameters of one block."""
    tensors = [
        *_norm("attention_norm", model),
        *_prefixed("attention", _attention(model)),
        *_norm("mlp_norm", model),
        *_prefixed("mlp", _moe(model) if model.is_moe_layer(layer) else _dense(model)),
    ]
    return [Parameter(f"blocks.{layer}.{name}", shape, kind, layer) for name, shape, kind in tensors]


def num_parameters(model: ModelSpec) -> int:
    """Number of all parameters; a tied embedding counts once."""
    return sum(parameter.num_elements for parameter in parameters(model))


def num_active_parameters(model: ModelSpec) -> int:
    """Number of active parameters of one token: of the routed experts only the chosen ones."""
    return sum(_active_elements(model, parameter) for parameter in parameters(model))


def num_matmul_parameters(model: ModelSpec) -> int:
    """Number of parameters in the matmuls of one token: with the head (also a tied one), no embedding.

    Six times this number, plus attention, are the model FLOPs of one trained token.
    """
    in_blocks = sum(
        _active_elements(model, parameter)
        for parameter in parameters(model)
        if parameter.kind in MATMUL_KINDS and parameter.kind != "head"
    )
    return in_blocks + model.vocab_size * model.width


def _active_elements(model: ModelSpec, parameter: Parameter) -> int:
    if parameter.kind != "expert" or model.moe is None:
        return parameter.num_elements
    return parameter.num_elements // model.moe.num_experts * model.moe.top_k


_Tensor = tuple[str, tuple[int, ...], ParameterKind]


def _prefixed(prefix: str, tensors: Iterator[_Tensor]) -> Iterator[_Tensor]:
    return ((f"{prefix}.{name}", shape, kind) for name, shape, kind in tensors)


def _linear(name: str, *, to: int, of: int, bias: bool = False) -> Iterator[_Tensor]:
    yield f"{name}.weight", (to, of), "matrix"
    if bias:
        yield f"{name}.bias", (to,), "bias"


def _norm(name: str, model: ModelSpec) -> Iterator[_Tensor]:
    yield f"{name}.weight", (model.width,), "norm"
    if model.norm == "layer":
        yield f"{name}.bias", (model.width,), "bias"


def _attention(model: ModelSpec) -> Iterator[_Tensor]:
    attention = model.attention
    if attention.latent is not None:
        return _latent_attention(attention, attention.latent, width=model.width)
    return _plain_attention(attention, width=model.width)


def _plain_attention(attention: AttentionSpec, *, width: int) -> Iterator[_Tensor]:
    query_width = attention.num_heads * attention.head_width
    kv_width = attention.num_kv_heads * attention.head_width
    yield from _linear("query", to=query_width, of=width, bias=attention.qkv_bias)
    yield from _linear("key", to=kv_width, of=width, bias=attention.qkv_bias)
    yield from _linear("value", to=kv_width, of=width, bias=attention.qkv_bias)
    if attention.qk_norm:
        yield "query_norm.weight", (attention.head_width,), "norm"
        yield "key_norm.weight", (attention.head_width,), "norm"
    yield from _linear("output", to=width, of=query_width, bias=attention.output_bias)


def _latent_attention(attention: AttentionSpec, latent: LatentSpec, *, width: int) -> Iterator[_Tensor]:
    query_width = attention.num_heads * (latent.nope_width + latent.rope_width)
    if latent.query_rank is None:
        yield from _linear("query", to=query_width, of=width)
    else:
        yield from _linear("query_down", to=latent.query_rank, of=width)
        yield "query_norm.weight", (latent.query_rank,), "norm"
        yield from _linear("query_up", to=query_width, of=latent.query_rank)
    yield from _linear("kv_down", to=latent.kv_rank + latent.rope_width, of=width)
    yield "kv_norm.weight", (latent.kv_rank,), "norm"
    kv_up_width = attention.num_heads * (latent.nope_width + latent.value_width)
    yield from _linear("kv_up", to=kv_up_width, of=latent.kv_rank)
    output_width = attention.num_heads * latent.value_width
    yield from _linear("output", to=width, of=output_width, bias=attention.output_bias)


def _dense(model: ModelSpec) -> Iterator[_Tensor]:
    mlp = model.mlp
    if mlp.kind == "swiglu":
        yield from _linear("gate", to=mlp.width, of=model.width, bias=mlp.bias)
    yield from _linear("up", to=mlp.width, of=model.width, bias=mlp.bias)
    yield from _linear("down", to=model.width, of=mlp.width, bias=mlp.bias)


def _moe(model: ModelSpec) -> Iterator[_Tensor]:
    moe = model.moe
    assert moe is not None
    yield "router.weight", (moe.num_experts, model.width), "router"
    yield "experts.gate", (moe.num_experts, moe.width, model.width), "expert"
    yield "experts.up", (moe.num_experts, moe.width, model.width), "expert"
    yield "experts.down", (moe.num_experts, model.width, moe.width), "expert"
    if moe.shared_width:
        yield from _linear("shared.gate", to=moe.shared_width, of=model.width)
        yield from _linear("shared.up", to=moe.shared_width, of=model.width)
        yield from _linear("shared.down", to=model.width, of=moe.shared_width)
