"""Grouped matmuls of frozen routed experts whose weights are NF4.

    forward    y[N, F]  =  x[N, D]  W'[e, F, D]^T
    dgrad      dx[N, D] = dy[N, F]  W'[e, F, D]

W' is dequantised in each pass into a buffer that lives as long as its matmul. Frozen weights have no wgrad,
so x is not saved. With nested NF4 the absmax are codes, and a table has the scales of every expert.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.grouped_mm import grouped_linear
from meshwright.ops.nf4 import dequantise_nf4
from meshwright.ops.nf4_nested import NestedPlace, unnest_absmax


class Nf4Experts(NamedTuple):
    """Stacked weights W[E, F, D] in NF4: packed bytes, and the bits of their absmax or their codes."""

    packed: Tensor
    absmax: Tensor
    table: Tensor | None = None
    """Where the absmax are codes (nested NF4): their table."""
    place: NestedPlace | None = None
    """Where the codes lie in the matrices of the table."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights in `dtype`."""
        return _dequantised(self.packed, self.absmax, self.table, self.place or (), dtype)


def _dequantised(
    packed: Tensor, absmax: Tensor, table: Tensor | None, place: Sequence[int], dtype: torch.dtype
) -> Tensor:
    if table is not None:
        absmax = unnest_absmax(absmax, table, NestedPlace(*place)).view(torch.int32)
    return dequantise_nf4(packed, absmax, dtype)


def nf4_grouped_linear(
    x_ND: Tensor,
    weight: Nf4Experts,
    counts_E: Tensor,
    dtype: torch.dtype,
    simulated: SimulatedDevice | None = None,
) -> Tensor:
    """y_NF in `dtype`: row n times the weight of its expert; see `grouped_linear`."""
    frozen, place = weight[:3], list(weight.place or ())
    return _Nf4GroupedLinear.apply(x_ND.to(dtype), counts_E, place, simulated, *frozen)  # pyright: ignore[reportReturnType]


class _Nf4GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        counts_E: Tensor,
        place: Sequence[int],
        simulated: SimulatedDevice | None,
        *frozen: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(counts_E, *frozen)
        ctx.place, ctx.simulated = place, simulated
        return grouped_linear(x_ND, deferred_nf4(*frozen, place, x_ND), counts_E, simulated)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        counts_E, *frozen = ctx.saved_tensors
        weight_EFD = deferred_nf4(*frozen, ctx.place, dy_NF)
        dx_ND = grouped_linear(dy_NF, weight_EFD.transpose(-2, -1), counts_E, ctx.simulated)
        return dx_ND, *(None,) * 6


@torch.library.custom_op("meshwright::deferred_nf4", mutates_args=())
def deferred_nf4(
    packed: Tensor, absmax: Tensor, table: Tensor | None, place: Sequence[int], after: Tensor
) -> Tensor:
    """The weights in the dtype of `after`, not before `after` exists.

    What backward computes from a weight alone, the compiler would compute in forward and save, for every
    layer.
    """
    return _dequantised(packed, absmax, table, place, after.dtype)


@deferred_nf4.register_fake
def _(packed: Tensor, absmax: Tensor, table: Tensor | None, place: Sequence[int], after: Tensor) -> Tensor:
    del absmax, table, place
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=after.dtype)
