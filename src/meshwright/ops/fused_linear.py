"""Several matrices on one input as one product.

    W[N, K]  = the rows of all matrices, one behind the other
    y[T, N]  = x[T, K] W^T
    dx[T, K] = dy[T, N] W              one sum over all rows; apart, each matrix has a dx, and they are added
    dW[N, K] = dy^T x

W costs nothing where the matrices lie one behind the other in memory (`lay_behind`), and no more than the
cast that each would need by itself where they are wider than the dtype of compute. The products are operators
of their own, so that whether the matrices do lie so is looked at when they run, not when a graph is made.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula


def joint_linear(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, totals: Sequence[Tensor] = ()
) -> Tensor:
    """x W^T over the last dim of x, computed in `dtype`: the products with all matrices side by side.

    With `totals`, whose rows are those of W together, backward adds dW to these and the matrices get none.
    """
    x_TK = x.flatten(0, -2).to(dtype)
    y_TN: Tensor = _JointLinear.apply(x_TK, len(weights), *weights, *totals)  # pyright: ignore[reportAssignmentType]
    return y_TN.unflatten(0, x.shape[:-1])


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, num_weights: int, *weights_and_totals: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, *weights_and_totals)
        ctx.num_weights = num_weights
        return joint_product(x_TK, weights_and_totals[:num_weights])

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TK, *both = ctx.saved_tensors
        weights, totals = both[: ctx.num_weights], both[ctx.num_weights :]
        dx_TK = joint_input_gradient(dy_TN, weights)
        if totals:
            add_product(totals, dy_TN, x_TK)
            return dx_TK, None, *(None for _ in both)
        # Parts of one tensor, so that the next micro-batch can add to all of them at once.
        dw_NK = (dy_TN.mT @ x_TK).to(weights[0].dtype)
        return dx_TK, None, *dw_NK.split([len(weight) for weight in weights])


@torch.library.custom_op("meshwright::joint_product", mutates_args=())
def joint_product(x_TK: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """y[T, N]."""
    return x_TK @ behind_each_other(weights, x_TK.dtype).mT


@joint_product.register_fake
def _(x_TK: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], sum(weight.shape[0] for weight in weights)))


@torch.library.custom_op("meshwright::joint_input_gradient", mutates_args=())
def joint_input_gradient(dy_TN: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """dx[T, K]."""
    return dy_TN @ behind_each_other(weights, dy_TN.dtype)


@joint_input_gradient.register_fake
def _(dy_TN: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return dy_TN.new_empty((dy_TN.shape[0], weights[0].shape[1]))


@torch.library.custom_op("meshwright::add_product", mutates_args=("totals",))
def add_product(totals: Sequence[Tensor], dy_TN: Tensor, x_TK: Tensor) -> None:
    """Each total gets its rows of dy^T x, summed in its own dtype. No total is a part of another."""
    for total, part_TN in zip(totals, dy_TN.split([len(total) for total in totals], dim=1), strict=True):
        _add(total, part_TN.mT, x_TK)


@add_product.register_fake
def _(totals: Sequence[Tensor], dy_TN: Tensor, x_TK: Tensor) -> None:
    return None


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def behind_each_other(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """W[N, K] in `dtype`: a view where the matrices lie so already, else a copy."""
    if weights[0].dtype == dtype and lies_behind(weights):
        return seen_as_one(weights)
    num_rows = sum(len(weight) for weight in weights)
    whole_NK = weights[0].new_empty((num_rows, weights[0].shape[1]), dtype=dtype)
    for part, weight in zip(whole_NK.split([len(weight) for weight in weights]), weights, strict=True):
        part.copy_(weight.detach())
    return whole_NK


def lies_behind(weights: Sequence[Tensor]) -> bool:
    """Whether each matrix begins where the one before it ends."""
    return all(weight.is_contiguous() for weight in weights) and all(
        first.untyped_storage() is second.untyped_storage()
        and first.dtype == second.dtype
        and first.storage_offset() + first.numel() == second.storage_offset()
        for first, second in pairwise(weights)
    )


def seen_as_one(weights: Sequence[Tensor]) -> Tensor:
    """A view of matrices that lie one behind the other."""
    num_rows, width = sum(len(weight) for weight in weights), weights[0].shape[1]
    return weights[0].detach().as_strided((num_rows, width), (width, 1))


def lay_behind(parameters: Sequence[nn.Parameter]) -> None:
    """Move matrices to where each begins behind the one before; whoever holds a view of one keeps the old."""
    whole_NK = torch.cat([one.detach() for one in parameters])
    for one, part in zip(parameters, whole_NK.split([len(one) for one in parameters]), strict=True):
        one.data = part


@register_flop_formula([torch.ops.meshwright.joint_product, torch.ops.meshwright.joint_input_gradient])
def _(rows: torch.Size, weights: Sequence[torch.Size], **_: Any) -> int:
    return 2 * rows[0] * sum(weight.numel() for weight in weights)


@register_flop_formula(torch.ops.meshwright.add_product)
def _(totals: Sequence[torch.Size], dy_TN: torch.Size, x_TK: torch.Size, **_: Any) -> int:
    return 2 * dy_TN[0] * dy_TN[1] * x_TK[1]


# What recompute keeps of a block's forward pass.
JOINT_OPERATORS = (torch.ops.meshwright.joint_product.default,)
