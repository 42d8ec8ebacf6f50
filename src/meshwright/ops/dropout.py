"""Dropout whose mask is a function of the row and the feature, not a draw from a generator.

    mask[n, k] = hash(key[n], k) >= p               k counts the features of the full, unsharded input
    drop(x)    = mask x / (1 - p)

`key` has 64 bits per row (`ops/dropout_keys.py`); the hash of an element is two rounds of 32-bit
multiplications. Backward and recompute compute the mask again, so no mask and no dropped copy is stored:

    u[N, R] = drop(x) A^T        saves x, which the adapters on one input share
    dA = du^T drop(x),  dx = drop(du A)

Forward in compiled blocks is plain operators, which the compiler fuses with their neighbours. Elsewhere, and
in backward, a kernel reads x and writes drop(x) in one pass on CUDA: the compiler would save drop(x) for a
backward of the same operators.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.cast import compute_dtype
from meshwright.ops.dropout_keys import signed
from meshwright.ops.grouped_mm import grouped_linear, grouped_weight_gradient

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.dropout_triton import drop_kernel

# Constants of lowbias32, a 32-bit hash of low bias.
FIRST, SECOND = signed(0x7FEB352D, 32), signed(0x846CA68B, 32)


class DropoutMask(NamedTuple):
    """The mask of the input of one matrix."""

    keys: Tensor
    """Keys of the rows, of the shape of x without its last dim."""
    first_feature: int
    """Index in the full input of the first feature that this rank has."""
    probability: float
    """Share of elements that are dropped."""

    def drop(self, x: Tensor) -> Tensor:
        """drop(x); its gradient is masked alike."""
        dropped: Tensor = _Drop.apply(x, *self)  # pyright: ignore[reportAssignmentType]
        return dropped

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """drop(x) W^T over the last dim of x; saves x."""
        dtype = compute_dtype(x)
        y: Tensor = _DroppedLinear.apply(x.to(dtype), weight.to(dtype), *self)  # pyright: ignore[reportAssignmentType]
        return y

    def grouped_linear(
        self, x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor, simulated: SimulatedDevice | None
    ) -> Tensor:
        """As `grouped_linear` of drop(x); saves x."""
        dtype = compute_dtype(x_ND)
        y_NF: Tensor = _DroppedGroupedLinear.apply(  # pyright: ignore[reportAssignmentType]
            x_ND.to(dtype), weight_EFD.to(dtype), counts_E, simulated, *self
        )
        return y_NF


def dropped(x: Tensor, keys: Tensor, first_feature: int, probability: float) -> Tensor:
    """drop(x) in forward, without a gradient of its own."""
    if torch.compiler.is_compiling():
        return _by_operators(x, keys, first_feature, probability)
    return _drop(x.contiguous(), keys.contiguous(), first_feature, probability, None)


def dropped_in_backward(
    x: Tensor, keys: Tensor, first_feature: int, probability: float, *, dy: Tensor
) -> Tensor:
    """drop(x) in backward; it waits for dy, or the compiler would compute it in forward and save it."""
    return _drop(x.contiguous(), keys.contiguous(), first_feature, probability, dy)


def is_kept(keys: Tensor, first_feature: int, width: int, probability: float) -> Tensor:
    """The mask of rows with these keys, [..., width]."""
    features_K = torch.arange(first_feature, first_feature + width, dtype=torch.int32, device=keys.device)
    low, high = keys.to(torch.int32)[..., None], (keys >> 32).to(torch.int32)[..., None]
    z = features_K ^ low  # not a product: the compiler takes one of features alone for an index of memory
    z = (z ^ ((z >> 16) & 0xFFFF)) * FIRST + high
    z = (z ^ ((z >> 15) & 0x1FFFF)) * SECOND
    return z >= threshold(probability)


def threshold(probability: float) -> int:
    """The least hash, as a signed 32-bit integer, of an element that is kept."""
    return min(round(probability * 2.0**32), 2**32 - 1) - 2**31


def _by_operators(x: Tensor, keys: Tensor, first_feature: int, probability: float) -> Tensor:
    kept = is_kept(keys, first_feature, x.shape[-1], probability)
    return torch.where(kept, x * (1.0 / (1.0 - probability)), 0.0)


@torch.library.custom_op("meshwright::drop", mutates_args=())
def _drop(x: Tensor, keys: Tensor, first_feature: int, probability: float, after: Tensor | None) -> Tensor:
    if x.is_cuda and x.dtype != torch.float64:
        return drop_kernel(x, keys, first_feature, threshold(probability), 1.0 / (1.0 - probability))
    return _by_operators(x, keys, first_feature, probability)


@_drop.register_fake
def _(x: Tensor, keys: Tensor, first_feature: int, probability: float, after: Tensor | None) -> Tensor:
    return torch.empty_like(x)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, first_feature: int, probability: float) -> Tensor:
        # No `*arguments`: the compiler takes the first of them for ctx where x needs no gradient.
        ctx.save_for_backward(keys)
        ctx.mask = first_feature, probability
        return dropped(x, keys, first_feature, probability)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dropped_in_backward(dy, *ctx.saved_tensors, *ctx.mask, dy=dy), None, None, None


class _DroppedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, keys: Tensor, first_feature: int, probability: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, keys)
        ctx.mask = first_feature, probability
        return functional.linear(dropped(x, keys, first_feature, probability), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, keys = ctx.saved_tensors
        dx = dropped_in_backward(dy @ weight, keys, *ctx.mask, dy=dy) if ctx.needs_input_grad[0] else None
        dweight = dy.flatten(0, -2).mT @ dropped_in_backward(x, keys, *ctx.mask, dy=dy).flatten(0, -2)
        return dx, dweight, None, None, None


class _DroppedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_EFD: Tensor,
        counts_E: Tensor,
        simulated: SimulatedDevice | None,
        keys_N: Tensor,
        first_feature: int,
        probability: float,
    ) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD, counts_E, keys_N)
        ctx.mask, ctx.simulated = (first_feature, probability), simulated
        x_ND = dropped(x_ND, keys_N, first_feature, probability)
        return grouped_linear(x_ND, weight_EFD, counts_E, simulated)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight_EFD, counts_E, keys_N = ctx.saved_tensors
        dx_ND = grouped_linear(dy_NF, weight_EFD.mT, counts_E, ctx.simulated)
        x_ND = dropped_in_backward(x_ND, keys_N, *ctx.mask, dy=dy_NF)
        dweight_EFD = grouped_weight_gradient(dy_NF, x_ND, counts_E, ctx.simulated)
        return dropped_in_backward(dx_ND, keys_N, *ctx.mask, dy=dy_NF), dweight_EFD, *(None,) * 5
