"""Grouped matmuls of frozen routed experts whose weights are NF4.

    forward    y[N, F]  =  x[N, D]  W'[e, F, D]^T
    dgrad      dx[N, D] = dy[N, F]  W'[e, F, D]

W' is dequantised in each pass into a buffer that lives as long as its matmul. Frozen weights have no wgrad,
so x is not saved.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.grouped_mm import grouped_linear
from meshwright.ops.nf4 import dequantise_nf4


class Nf4Experts(NamedTuple):
    """Stacked weights W[E, F, D] in NF4: packed bytes, and the bits of their absmax."""

    packed: Tensor
    absmax: Tensor


def nf4_grouped_linear(
    x_ND: Tensor,
    weight: Nf4Experts,
    counts_E: Tensor,
    dtype: torch.dtype,
    simulated: SimulatedDevice | None = None,
) -> Tensor:
    """y_NF in `dtype`: row n times the weight of its expert; see `grouped_linear`."""
    return _Nf4GroupedLinear.apply(x_ND.to(dtype), *weight, counts_E, simulated)  # pyright: ignore[reportReturnType]


class _Nf4GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        packed: Tensor,
        absmax: Tensor,
        counts_E: Tensor,
        simulated: SimulatedDevice | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, absmax, counts_E)
        ctx.simulated = simulated
        return grouped_linear(x_ND, deferred_nf4(packed, absmax, x_ND), counts_E, simulated)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, absmax, counts_E = ctx.saved_tensors
        weight_EFD = deferred_nf4(packed, absmax, dy_NF)
        dx_ND = grouped_linear(dy_NF, weight_EFD.transpose(-2, -1), counts_E, ctx.simulated)
        return dx_ND, None, None, None, None


@torch.library.custom_op("meshwright::deferred_nf4", mutates_args=())
def deferred_nf4(packed: Tensor, absmax: Tensor, after: Tensor) -> Tensor:
    """The weights in the dtype of `after`, not before `after` exists.

    What backward computes from a weight alone, the compiler would compute in forward and save, for every
    layer.
    """
    return dequantise_nf4(packed, absmax, after.dtype)


@deferred_nf4.register_fake
def _(packed: Tensor, absmax: Tensor, after: Tensor) -> Tensor:
    del absmax
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=after.dtype)
