"""Rows of tokens sorted by expert (permutation), and the sum of a token's rows (its inverse).

    gather   x[T, D] -> x[N, D]     row n is a copy of token[n]
    sum      y[N, D] -> y[T, D]     token t is the sum of its C rows, place[t, c]

Each is the gradient of the other, and each reads rows and writes a result once. `index_put` would add with
atomics, in an order that changes from run to run. The sum is a Triton kernel on CUDA: that of torch's
compiler takes three times as long (on an H200 1.39 ms instead of 0.42 for both sums of a layer, 131,072 rows
of width 2048).
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.ops.cast import accumulation_dtype, cast

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.expert_rows_triton import sum_rows_kernel


class ExpertRows(NamedTuple):
    """Which choice of which token each row is; T tokens with C choices, N rows in the order of experts."""

    choice_N: Tensor
    """Index of the row's choice among the T x C choices."""
    place_TC: Tensor
    """Row of each choice; N or more where the choice was dropped."""

    @property
    def token_N(self) -> Tensor:
        """Token of each row."""
        return self.choice_N // self.place_TC.shape[1]

    def choices(self, x_TC: Tensor) -> Tensor:
        """x_N: the value of each row's choice."""
        return x_TC.flatten()[self.choice_N]


def rows_by_expert(experts_TC: Tensor, num_kept: int | None = None) -> ExpertRows:
    """The rows of all choices, or of the `num_kept` first ones: expert by expert, in the order of tokens."""
    # A sort of 16 bits takes half the time of one of 64.
    order_N = experts_TC.flatten().to(torch.int16).argsort(stable=True)
    places = torch.arange(len(order_N), device=order_N.device)
    place_TC = torch.empty_like(order_N).scatter_(0, order_N, places).view_as(experts_TC)
    return ExpertRows(order_N[:num_kept], place_TC)


def rows_of_tokens(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    """x_ND: the token of each row."""
    return _Gather.apply(x_TD, *rows)  # pyright: ignore[reportReturnType]


def rows_of_tokens_twice(x_TD: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """x_ND for two readers, in the same memory. Their gradients are added in the pass that sums rows."""
    return _GatherTwice.apply(x_TD, *rows)  # pyright: ignore[reportReturnType]


def sum_of_rows(y_ND: Tensor, rows: ExpertRows) -> Tensor:
    """y_TD: the sum of each token's rows, rounded once; dropped choices count as zero."""
    return _Sum.apply(y_ND, *rows)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("meshwright::sum_rows", mutates_args=())
def sum_rows(y_ND: Tensor, other_ND: Tensor | None, place_TC: Tensor) -> Tensor:
    """Sums of the rows of `y_ND`, and of `other_ND` where it is given, in fp32 (fp64 for fp64)."""
    if y_ND.is_cuda and y_ND.dtype != torch.float64:
        return sum_rows_kernel(y_ND, other_ND, place_TC)
    dtype, is_kept_TC1 = accumulation_dtype(y_ND), (place_TC < len(y_ND))[..., None]
    padded_ND = torch.cat((y_ND.to(dtype), y_ND.new_zeros((1, y_ND.shape[1]), dtype=dtype)))
    if other_ND is not None:
        padded_ND[:-1] += other_ND
    summed_TD = torch.where(is_kept_TC1, padded_ND[place_TC.clamp(max=len(y_ND))], 0.0).sum(1)
    return cast(summed_TD, y_ND.dtype)


@sum_rows.register_fake
def _(y_ND: Tensor, other_ND: Tensor | None, place_TC: Tensor) -> Tensor:
    return y_ND.new_empty((place_TC.shape[0], y_ND.shape[1]))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, choice_N: Tensor, place_TC: Tensor) -> Tensor:
        ctx.save_for_backward(place_TC)
        return x_TD[ExpertRows(choice_N, place_TC).token_N]

    @staticmethod
    def backward(ctx: Any, dx_ND: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (place_TC,) = ctx.saved_tensors
        return sum_rows(dx_ND.contiguous(), None, place_TC), None, None


class _GatherTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, choice_N: Tensor, place_TC: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(place_TC)
        x_ND = x_TD[ExpertRows(choice_N, place_TC).token_N]
        return x_ND, x_ND.view_as(x_ND)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, first_ND: Tensor, second_ND: Tensor
    ) -> tuple[Tensor | None, ...]:
        (place_TC,) = ctx.saved_tensors
        return sum_rows(first_ND.contiguous(), second_ND.contiguous(), place_TC), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, choice_N: Tensor, place_TC: Tensor) -> Tensor:
        ctx.save_for_backward(choice_N, place_TC)
        return sum_rows(y_ND.contiguous(), None, place_TC)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy_TD[ExpertRows(*ctx.saved_tensors).token_N], None, None
