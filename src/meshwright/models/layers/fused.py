"""Fused QKV and gate-up projections: linears that share their input as one matmul."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.layers.attention import Attention
from meshwright.models.layers.linear import Linear, QkvProjections, adapted_linears
from meshwright.models.layers.matmul import Matmul
from meshwright.models.layers.mlp import GateUp, SwiGlu
from meshwright.ops.cast import compute_dtype
from meshwright.ops.fused_linear import fused_linear
from meshwright.ops.swiglu import swiglu


class FusedQkvProjections(QkvProjections):
    """Queries, keys and values of one matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_buffers: Sequence[Tensor] = ()  # see Linear

    def forward(
        self, x: Tensor, linears: Sequence[Linear], dropout_keys: Tensor | None = None
    ) -> list[Tensor]:
        """Queries, keys and values as separate tensors: one that is saved must not keep the others alive."""
        y = _fused(x, linears, self.grad_buffers, dropout_keys)
        parts = y.split([len(linear.weight) for linear in linears], dim=-1)
        return [part.contiguous() for part in parts]


class FusedGateUp(GateUp):
    """silu(gate) * up of one matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_buffers: Sequence[Tensor] = ()  # see Linear

    def forward(self, x: Tensor, gate: Linear, up: Linear, dropout_keys: Tensor | None = None) -> Tensor:
        """silu(gate(x)) * up(x), over the last dim of x."""
        return swiglu(_fused(x, (gate, up), self.grad_buffers, dropout_keys))


def _fused(
    x: Tensor, linears: Sequence[Linear], grad_buffers: Sequence[Tensor], dropout_keys: Tensor | None
) -> Tensor:
    """The outputs of all linears, concatenated, with their adapters and biases."""
    has_fused, is_packed = has_fused_adapters(linears), linears[0].weight_absmax is not None
    if has_fused or is_packed:
        y = adapted_linears(x, linears, None if has_fused else [None] * len(linears))
    else:
        y = fused_linear(x, [linear.weight for linear in linears], compute_dtype(x), grad_buffers)
    if not has_fused and any(linear.adapter is not None for linear in linears):
        parts = zip(y.split([len(linear.weight) for linear in linears], dim=-1), linears, strict=True)
        y = torch.cat([one.with_adapter(x, part, dropout_keys) for part, one in parts], dim=-1)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return y + torch.cat(biases).to(y.dtype) if biases else y


def has_fused_adapters(linears: Sequence[Linear]) -> bool:
    """Whether the operator of the frozen linears adds all their adapters."""
    adapters = [linear.adapter for linear in linears if linear.adapter is not None]
    is_frozen = not any(linear.weight.requires_grad for linear in linears)
    # len(), not bool(): under recompute torch 2.11's compiler gives up at bool() of a list, without a word.
    return is_frozen and len(adapters) > 0 and all(adapter.is_fused for adapter in adapters)


def linears_sharing_input(module: nn.Module) -> tuple[Linear, ...]:
    """The linears of a module that multiply the same input: query, key and value, or gate and up."""
    if isinstance(module, Attention):
        return module.query, module.key, module.value
    return (module.gate, module.up) if isinstance(module, SwiGlu) else ()


def fuse_linears(module: Attention | SwiGlu) -> None:
    """Compute the linears that share their input in one matmul, unless tp or fp8 replaced their matmuls."""
    current = module.qkv if isinstance(module, Attention) else module.gate_up
    is_plain = type(current) in (QkvProjections, GateUp)
    linears = linears_sharing_input(module)
    if not is_plain or any(type(one.matmul) is not Matmul or one.reduce_output for one in linears):
        return
    if isinstance(module, Attention):
        module.qkv = FusedQkvProjections()
    else:
        module.gate_up = FusedGateUp()


def fused_projection_of(module: nn.Module) -> FusedQkvProjections | FusedGateUp | None:
    """The fused projection of a module, where `fuse_linears` installed one."""
    if isinstance(module, Attention) and isinstance(module.qkv, FusedQkvProjections):
        return module.qkv
    if isinstance(module, SwiGlu) and isinstance(module.gate_up, FusedGateUp):
        return module.gate_up
    return None
