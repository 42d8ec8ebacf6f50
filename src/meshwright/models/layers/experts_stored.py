"""Grouped matmuls of frozen routed experts whose weights are stored in fp8: one byte per weight.

    forward    y[N, F]  =  x[N, D]  W[e, F, D]^T
    dgrad      dx[N, D] = dy[N, F]  W^T[e, D, F]^T       W^T is written in backward

Rows of x and dy have one scale each, as in `experts_fp8.py`. Each expert of a projection has one scale, a
power of two: the grouped kernel takes it per expert, and gate and up are two matmuls in both passes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.experts_fp8 import Fp8Call, expert_matmul, quantise_rows
from meshwright.precision.fp8.expert_weights import QuantisedExperts
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, AmaxGroups, Fp8Options
from meshwright.precision.fp8.quantise import Quantised
from meshwright.precision.fp8.recipes import E4M3, RECIPES
from meshwright.precision.fp8.stored import RECIPE
from meshwright.precision.fp8.transpose import deferred_stacked_transpose


class StoredExperts(NamedTuple):
    """Stacked weights W[E, F, D] in fp8: bytes, and a scale for each expert."""

    stored: Tensor
    scale_ERC: Tensor


class StoredFp8GroupedLinears(nn.Module):
    """Replaces `GroupedLinears` where the frozen weights are stored in fp8."""

    def __init__(self, *, dtype: torch.dtype, native: bool, amax_groups: AmaxGroups = NO_AMAX_GROUPS) -> None:
        super().__init__()
        self.options, self.dtype = Fp8Options(RECIPE, native, amax_groups), dtype

    def forward(
        self,
        xs_ND: Sequence[Tensor],
        weights: Sequence[StoredExperts],
        counts_E: Tensor,
        simulated: SimulatedDevice | None = None,
    ) -> list[Tensor]:
        """y_NF of each weight; the xs are the same rows, once for each weight."""
        xs_ND = [x_ND.to(self.dtype) for x_ND in xs_ND]
        rows = quantise_rows(xs_ND[0].detach(), RECIPES[RECIPE], self.options.amax_groups.x)
        call = Fp8Call(self.options, simulated)
        return [
            _StoredGroupedLinear.apply(x_ND, counts_E, call, *rows, *weight)  # pyright: ignore[reportReturnType]
            for x_ND, weight in zip(xs_ND, weights, strict=True)
        ]


class _StoredGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, counts_E: Tensor, call: Fp8Call, *tensors: Tensor) -> Tensor:
        values_ND, scale_NC, stored_EFD, scale_ERC = tensors
        ctx.save_for_backward(stored_EFD, scale_ERC, counts_E)
        ctx.call = call
        weight = QuantisedExperts(stored_EFD.view(E4M3), scale_ERC)
        rows = Quantised(values_ND, scale_NC)
        return expert_matmul(rows, weight, counts_E, call, to=x_ND.dtype, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stored_EFD, scale_ERC, counts_E = ctx.saved_tensors
        call: Fp8Call = ctx.call
        dy = quantise_rows(dy_NF.contiguous(), call.recipe, call.options.amax_groups.gradient)
        # Not saved from forward: it would keep gathered weights and undo ZeRO-3.
        transposed_EDF = deferred_stacked_transpose(stored_EFD, dy.values_MK).view(E4M3)
        weight = QuantisedExperts(transposed_EDF, scale_ERC)
        return expert_matmul(dy, weight, counts_E, call, to=dy_NF.dtype), *(None,) * 6
