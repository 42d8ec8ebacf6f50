"""Fused QKV and gate-up projections in fp8: one cast of the input and one GEMM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.layers.adapted_fp8 import (
    Factors,
    stored_adapted_linear,
    stored_adapted_swiglu,
)
from meshwright.models.layers.fused import has_fused_adapters
from meshwright.models.layers.linear import Linear
from meshwright.ops.sharded import local
from meshwright.precision.fp8.linear import Fp8Matmul
from meshwright.precision.fp8.stored import StoredFp8Matmul


class Fp8QkvProjections(nn.Module):
    """Replaces `QkvProjections`."""

    def __init__(self, matmul: Fp8Matmul | StoredFp8Matmul) -> None:
        super().__init__()
        self.matmul = matmul

    def forward(
        self, x: Tensor, linears: Sequence[Linear], dropout_keys: Tensor | None = None
    ) -> list[Tensor]:
        """Queries, keys and values as separate tensors: one that is saved must not keep the others alive."""
        if isinstance(self.matmul, StoredFp8Matmul) and has_fused_adapters(linears):
            parts = _adapted(self.matmul, x, linears)
        else:
            parts = _fused(self.matmul, x, linears, dropout_keys)
        return [part.contiguous() for part in parts]


class Fp8GateUp(nn.Module):
    """Replaces `GateUp`."""

    def __init__(self, matmul: Fp8Matmul | StoredFp8Matmul) -> None:
        super().__init__()
        self.matmul = matmul

    def forward(self, x: Tensor, gate: Linear, up: Linear, dropout_keys: Tensor | None = None) -> Tensor:
        """silu(gate(x)) * up(x)."""
        linears = (gate, up)
        is_fused = has_fused_adapters(linears) and gate.bias is None
        if isinstance(self.matmul, StoredFp8Matmul) and is_fused:
            return stored_adapted_swiglu(self.matmul, x, [one.weight for one in linears], _factors(linears))
        gate_BSF, up_BSF = _fused(self.matmul, x, linears, dropout_keys)
        return functional.silu(gate_BSF) * up_BSF


def _factors(linears: Sequence[Linear]) -> Factors:
    return [None if one.adapter is None else one.adapter.scaled_factors() for one in linears]


def _adapted(matmul: StoredFp8Matmul, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """The output of each linear with its adapter and its bias, from one operator."""
    y = stored_adapted_linear(matmul, x, [linear.weight for linear in linears], _factors(linears))
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    y = y + torch.cat(biases).to(y.dtype) if len(biases) > 0 else y
    return y.split([len(linear.weight) for linear in linears], dim=-1)


def _fused(
    matmul: Fp8Matmul | StoredFp8Matmul, x: Tensor, linears: Sequence[Linear], dropout_keys: Tensor | None
) -> list[Tensor]:
    outputs = matmul.fused(x, [local(linear.weight) for linear in linears])
    return [_finished(x, y, linear, dropout_keys) for y, linear in zip(outputs, linears, strict=True)]


def _finished(x: Tensor, y: Tensor, linear: Linear, dropout_keys: Tensor | None) -> Tensor:
    """The output of one linear with its adapter and its bias."""
    y = linear.with_adapter(x, y, dropout_keys)
    return y if linear.bias is None else y + local(linear.bias).to(y.dtype)
