"""Several weight matrices on one input as one matmul (fused QKV, fused gate-up).

    W[N, K]           = the rows of all matrices, concatenated
    y[T, N]           = x[T, K] W^T
    dgrad    dx[T, K] = dy[T, N] W       one matmul; separate matrices each have a dx, and these are added
    wgrad    dW[N, K] = dy^T x

W costs nothing where the matrices are packed: adjacent in memory (`pack_weights`). Where the weights are cast
to the compute dtype, it costs no more than the casts that separate matrices need. The matmuls are custom ops,
so that packing is checked when they run, not when a graph is compiled.

Weight-gradient accumulation fusion: with `grad_buffers`, backward adds dW to these in the matmul itself.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from meshwright.ops.autograd_function import applied


def fused_linear(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, grad_buffers: Sequence[Tensor] = ()
) -> Tensor:
    """x W^T over the last dim of x, computed in `dtype`: the outputs of all matrices, concatenated.

    With `grad_buffers`, whose rows together are those of W, backward adds dW to them, and the weights get no
    gradient.
    """
    x_TK = x.flatten(0, -2).to(dtype)
    if any(weight.requires_grad for weight in weights):
        y_TN: Tensor = applied(_FusedLinear, x_TK, len(weights), *weights, *grad_buffers)
    else:
        y_TN = applied(_FrozenLinear, x_TK, *weights)
    return y_TN.unflatten(0, x.shape[:-1])


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, num_weights: int, *weights_and_buffers: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, *weights_and_buffers)
        ctx.num_weights = num_weights
        return fused_matmul(x_TK, weights_and_buffers[:num_weights])

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, *both = ctx.saved_tensors
        weights, grad_buffers = both[: ctx.num_weights], both[ctx.num_weights :]
        dx_TK = fused_dgrad(dy_TN, weights)
        if grad_buffers:
            accumulate_wgrad(grad_buffers, dy_TN, x_TK)
            return dx_TK, None, *(None for _ in both)
        # Slices of one tensor, so that the next micro-batch can add to all of them in one matmul.
        dw_NK = (dy_TN.mT @ x_TK).to(weights[0].dtype)
        return dx_TK, None, *dw_NK.split([len(weight) for weight in weights])


class _FrozenLinear(torch.autograd.Function):
    """Frozen matrices: dgrad only, and x is not saved."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return fused_matmul(x_TK, weights)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = ctx.saved_tensors  # recompute lets them be read once
        return fused_dgrad(dy_TN, weights), *(None for _ in weights)


@torch.library.custom_op("meshwright::fused_matmul", mutates_args=())
def fused_matmul(x_TK: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """y[T, N] = x W^T."""
    return x_TK @ concatenated(weights, x_TK.dtype).mT


@fused_matmul.register_fake
def _(x_TK: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], sum(weight.shape[0] for weight in weights)))


@torch.library.custom_op("meshwright::fused_dgrad", mutates_args=())
def fused_dgrad(dy_TN: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """dx[T, K] = dy W."""
    return dy_TN @ concatenated(weights, dy_TN.dtype)


@fused_dgrad.register_fake
def _(dy_TN: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return dy_TN.new_empty((dy_TN.shape[0], weights[0].shape[1]))


@torch.library.custom_op("meshwright::accumulate_wgrad", mutates_args=("grad_buffers",))
def accumulate_wgrad(grad_buffers: Sequence[Tensor], dy_TN: Tensor, x_TK: Tensor) -> None:
    """Add to each buffer its rows of dy^T x, summed in the buffer's dtype. The buffers do not overlap."""
    parts = dy_TN.split([len(buffer) for buffer in grad_buffers], dim=1)
    for buffer, part_TN in zip(grad_buffers, parts, strict=True):
        _accumulate(buffer, part_TN.mT, x_TK)


@accumulate_wgrad.register_fake
def _(grad_buffers: Sequence[Tensor], dy_TN: Tensor, x_TK: Tensor) -> None:
    return None


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def concatenated(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """W[N, K] in `dtype`: a view where the matrices are packed already, else a copy."""
    if weights[0].dtype == dtype and is_packed(weights):
        return packed_view(weights)
    num_rows = sum(len(weight) for weight in weights)
    weight_NK = weights[0].new_empty((num_rows, weights[0].shape[1]), dtype=dtype)
    for part, weight in zip(weight_NK.split([len(weight) for weight in weights]), weights, strict=True):
        part.copy_(weight.detach())
    return weight_NK


def is_packed(weights: Sequence[Tensor]) -> bool:
    """Whether each matrix begins in memory where the one before it ends."""
    return all(weight.is_contiguous() for weight in weights) and all(
        first.untyped_storage() is second.untyped_storage()
        and first.dtype == second.dtype
        and first.storage_offset() + first.numel() == second.storage_offset()
        for first, second in pairwise(weights)
    )


def packed_view(weights: Sequence[Tensor]) -> Tensor:
    """One view of all rows of packed matrices."""
    num_rows, width = sum(len(weight) for weight in weights), weights[0].shape[1]
    return weights[0].detach().as_strided((num_rows, width), (width, 1))


def pack_weights(parameters: Sequence[nn.Parameter]) -> None:
    """Move matrices into one contiguous tensor; views of a parameter taken before keep the old memory."""
    weight_NK = torch.cat([one.detach() for one in parameters])
    for one, part in zip(parameters, weight_NK.split([len(one) for one in parameters]), strict=True):
        one.data = part


@register_flop_formula([torch.ops.meshwright.fused_matmul, torch.ops.meshwright.fused_dgrad])
def _(rows: torch.Size, weights: Sequence[torch.Size], **_: Any) -> int:
    return 2 * rows[0] * sum(weight.numel() for weight in weights)


@register_flop_formula(torch.ops.meshwright.accumulate_wgrad)
def _(grad_buffers: Sequence[torch.Size], dy_TN: torch.Size, x_TK: torch.Size, **_: Any) -> int:
    return 2 * dy_TN[0] * dy_TN[1] * x_TK[1]


# The forward matmul, whose output selective recompute saves.
FUSED_OPERATORS = (torch.ops.meshwright.fused_matmul.default,)
