"""Fused QKV and gate-up projections in fp8: one cast of the input and one GEMM."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.layers.linear import Linear
from meshwright.ops.sharded import local
from meshwright.precision.fp8.linear import Fp8Matmul
from meshwright.precision.fp8.stored import StoredFp8Matmul


class Fp8QkvProjections(nn.Module):
    """Replaces `QkvProjections`."""

    def __init__(self, matmul: Fp8Matmul | StoredFp8Matmul) -> None:
        super().__init__()
        self.matmul = matmul

    def forward(self, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
        """Queries, keys and values as separate tensors: one that is saved must not keep the others alive."""
        return [y.contiguous() for y in _fused(self.matmul, x, linears)]


class Fp8GateUp(nn.Module):
    """Replaces `GateUp`."""

    def __init__(self, matmul: Fp8Matmul | StoredFp8Matmul) -> None:
        super().__init__()
        self.matmul = matmul

    def forward(self, x: Tensor, gate: Linear, up: Linear) -> Tensor:
        """silu(gate(x)) * up(x)."""
        gate_BSF, up_BSF = _fused(self.matmul, x, (gate, up))
        return functional.silu(gate_BSF) * up_BSF


def _fused(matmul: Fp8Matmul | StoredFp8Matmul, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    outputs = matmul.fused(x, [local(linear.weight) for linear in linears])
    return [_finished(x, y, linear) for y, linear in zip(outputs, linears, strict=True)]


def _finished(x: Tensor, y: Tensor, linear: Linear) -> Tensor:
    """The output of one linear with its adapter and its bias."""
    y = linear.with_adapter(x, y)
    return y if linear.bias is None else y + local(linear.bias).to(y.dtype)
