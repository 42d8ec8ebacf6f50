"""A linear layer whose matmul can be replaced, and the QKV projections made of three of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.layers.adapter import Adapter
from meshwright.models.layers.matmul import Matmul
from meshwright.ops.adapted_linear import adapted_linear
from meshwright.ops.cast import compute_dtype
from meshwright.ops.fused_linear import fused_linear
from meshwright.ops.sharded import local


class Linear(nn.Module):
    """y = x W^T + b; the weight is [out_width, in_width] as in torch."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None
        self.matmul: nn.Module = Matmul()
        # Set where tp shards the input dim: reduces the partial outputs; the bias is added after it, once.
        self.reduce_output: nn.Module | None = None
        # Set where the weight is frozen and an adapter beside it is trained.
        self.adapter: Adapter | None = None
        # Weight-gradient accumulation fusion: when set, backward adds dW to this one tensor.
        self.grad_buffers: Sequence[Tensor] = ()

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, over the last dim of x."""
        if self.grad_buffers:
            return fused_linear(x, [self.weight], compute_dtype(x), self.grad_buffers)
        if self.adapter is not None and self.adapter.is_fused:
            return adapted_linears(x, (self,))
        bias = None if self.bias is None else local(self.bias)
        if self.reduce_output is None and self.adapter is None:
            return self.matmul(x, local(self.weight), bias)
        y = self.matmul(x, local(self.weight))
        if self.adapter is not None:
            y = self.adapter(x, y, local(self.weight))
        if self.reduce_output is not None:
            y = self.reduce_output(y)
        if bias is None:
            return y
        return y + (bias if self.adapter is None else bias.to(y.dtype))


def adapted_linears(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """The outputs of frozen linears with fused adapters, concatenated, with their biases."""
    adapters = [linear.adapter for linear in linears]
    y = adapted_linear(
        x,
        [linear.weight for linear in linears],
        [None if one is None else (one.lora_A, one.scale * one.lora_B) for one in adapters],
        compute_dtype(x),
    )
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return y + torch.cat(biases).to(y.dtype) if biases else y


class QkvProjections(nn.Module):
    """Linears on the same input, one after the other; replaced where they are fused into one matmul."""

    def forward(self, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
        """The output of each linear."""
        return [linear(x) for linear in linears]
