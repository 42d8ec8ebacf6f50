"""Frozen weights that are stored in fp8, with no other copy: one byte per weight.

    forward    y_i[T, N_i] =  x[T, K]  W_i[N_i, K]^T      one GEMM per matrix: nothing is concatenated
    dgrad      dx[T, K]    = dy[T, N]  W^T[K, N]^T        one GEMM; W^T of all matrices is written in backward

Linears that share their input have one scale, a power of two, from the amax of all of them. E4M3 keeps its
three bits for numbers down to 2^-15 of the amax, so finer scales would round almost no weight otherwise. x
and dy are cast in every micro-batch, as in the recipe `current`.

The bytes are uint8, and the scale is a buffer: mixed precision casts floating-point parameters, and ZeRO-3
shards parameters.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.linear import AmaxGroups, Fp8Options
from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import Quantised, encode, power_of_two_scale, quantise
from meshwright.precision.fp8.recipes import E4M3, RECIPES
from meshwright.precision.fp8.transpose import deferred_transpose

RECIPE = "current"


class Fp8Scale(nn.Module):
    """The scale of stored weights, shared by linears that share their input; or one for each expert."""

    value: Tensor
    """fp32: a scalar, or [E, 1, 1] for the experts that this rank computes with."""

    def __init__(self, num_experts: int | None = None) -> None:
        super().__init__()
        self.experts: slice | None = None
        # Not persistent: it is set with the weights, whenever they are loaded.
        self.register_buffer("value", torch.ones((), device="meta"), persistent=False)
        if num_experts is not None:
            self.set_experts(slice(0, num_experts))

    def set_experts(self, experts: slice) -> None:
        """Set the experts that this rank computes with; on the meta device."""
        self.experts = experts
        self.value = torch.ones((experts.stop - experts.start, 1, 1), device="meta")

    def index(self, held: slice) -> slice | EllipsisType:
        """The index into `value` of a shard whose first dim has these rows, or experts, of the weight."""
        if self.experts is None:
            return ...
        first = held.start - self.experts.start
        return slice(first, first + held.stop - held.start)


def stored_scale(amax: Tensor) -> Tensor:
    """The scale of weights whose largest magnitude is `amax`, fp32."""
    return power_of_two_scale(amax, E4M3)


def weight_amax(weight: Tensor) -> Tensor:
    """The largest magnitude of a matrix, or [E, 1, 1] of stacked ones, fp32."""
    return (weight.abs().amax((1, 2), keepdim=True) if weight.ndim > 2 else weight.abs().amax()).float()


def encode_stored(weight: Tensor, scale: Tensor) -> Tensor:
    """The bytes of a weight, or of stacked ones with a scale each."""
    if weight.dtype == torch.float16:  # CUDA would round 1 / scale to fp16, which ends at 65504
        weight = weight.float()
    return encode(weight, scale, E4M3, None).values_MK.view(torch.uint8)


def decode_stored(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that the bytes stand for; exact in bf16, fp32 and fp64."""
    return stored.view(E4M3).to(dtype) * scale.to(dtype)


def _quantised(stored_NK: Tensor, scale: Tensor) -> Quantised:
    return Quantised(stored_NK.view(E4M3), scale)


class StoredFp8Matmul(nn.Module):
    """Replaces the matmul of a linear, or of linears that share their input, whose weights are bytes."""

    def __init__(self, scale: Fp8Scale, *, dtype: torch.dtype, native: bool, amax_groups: AmaxGroups) -> None:
        super().__init__()
        self.scale, self.dtype = scale, dtype
        self.options = Fp8Options(RECIPE, native, amax_groups)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b over the last dim of x, in the dtype of the other matmuls."""
        (y,) = self.fused(x, (weight,))
        return y if bias is None else y + bias.to(y.dtype)

    def fused(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x W^T of each W, over the last dim of x."""
        x_TK = x.flatten(0, -2).to(self.dtype)
        if torch.is_grad_enabled() and x_TK.requires_grad:
            ys_TN: tuple[Tensor, ...] = _StoredFp8Linears.apply(  # pyright: ignore[reportAssignmentType]
                x_TK, self.scale.value, self.options, *weights
            )
        else:  # the compiler cannot trace a Function without gradients, see `ops.autograd_function`
            ys_TN = _forward(x_TK, self.scale.value, self.options, weights)
        return tuple(y_TN.unflatten(0, x.shape[:-1]) for y_TN in ys_TN)


def _forward(
    x_TK: Tensor, scale: Tensor, options: Fp8Options, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    recipe = RECIPES[options.recipe]
    x = quantise(x_TK, recipe.operand, recipe.token_block, options.amax_groups.x)
    return tuple(
        matmul(x, _quantised(each, scale), to=x_TK.dtype, native=options.native, fast_accumulation=True)
        for each in weights
    )


class _StoredFp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, scale: Tensor, options: Fp8Options, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scale, *weights)
        ctx.options = options
        return _forward(x_TK, scale, options, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recipe, options = RECIPES[ctx.options.recipe], ctx.options
        scale, *weights = ctx.saved_tensors
        dy_TN = grads[0] if len(grads) == 1 else torch.cat(list(grads), dim=1)
        dy = quantise(dy_TN, recipe.gradient, recipe.token_block, options.amax_groups.gradient)
        # Not saved from forward: it would keep gathered weights and undo ZeRO-3.
        transposed_KN = deferred_transpose(list(weights), dy.values_MK)
        dx_TK = matmul(dy, _quantised(transposed_KN, scale), to=dy_TN.dtype, native=options.native)
        return dx_TK, None, None, *(None for _ in weights)
