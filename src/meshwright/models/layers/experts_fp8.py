"""Grouped matmuls of routed experts in fp8.

    forward    y[N, F]     =  x[N, D]  W[e, F, D]^T       fp8
    dgrad      dx[N, D]    = dy[N, F]  W^T[e, D, F]^T     fp8
    wgrad      dW[e, F, D] = dy[N_e, F]^T  x[N_e, D]      the dtype of x

Every row of x and dy has scales of its own: one (`current`), or one per 128 values (`blockwise`). So the
rounding of a token does not depend on the other rows of its rank, which ep changes, and the compiler casts a
row in the kernel that produces it. All values are E4M3: torch's grouped kernel takes nothing else.

wgrad sums over the rows of an expert. The fp8 kernel would need their number to be a multiple of 16, and x
and dy a second time, transposed and with other scales. So it runs in bf16, and x is kept in bf16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.ops.cast import cast
from meshwright.ops.grouped_mm import group_ends, grouped_linear, grouped_weight_gradient
from meshwright.precision.fp8.expert_weights import (
    CachedFp8Experts,
    QuantisedExperts,
    decode_experts,
    deferred_transposed_experts,
    encode_experts,
    expert_scales,
)
from meshwright.precision.fp8.grouped_matmul import grouped_matmul
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, AmaxGroups, Fp8Options
from meshwright.precision.fp8.quantise import Groups, Quantised, decode, quantise
from meshwright.precision.fp8.recipes import RECIPES, Recipe


class Fp8GroupedLinears(nn.Module):
    """Replaces `GroupedLinears`: the rows are cast once for all weights."""

    def __init__(
        self,
        recipe: str,
        *,
        dtype: torch.dtype,
        native: bool,
        amax_groups: AmaxGroups = NO_AMAX_GROUPS,
        cached_weights: Sequence[CachedFp8Experts] = (),
    ) -> None:
        super().__init__()
        self.options, self.dtype = Fp8Options(recipe, native, amax_groups), dtype
        self.cached_weights = nn.ModuleList(cached_weights)

    def forward(
        self,
        xs_ND: Sequence[Tensor],
        weights_EFD: Sequence[Tensor],
        counts_E: Tensor,
        simulated: SimulatedDevice | None = None,
    ) -> list[Tensor]:
        """y_NF of each weight; the xs are the same rows, once for each weight."""
        xs_ND = [x_ND.to(self.dtype) for x_ND in xs_ND]
        recipe, groups = RECIPES[self.options.recipe], self.options.amax_groups
        rows = quantise_rows(xs_ND[0].detach(), recipe, groups.x)
        call = Fp8Call(self.options, simulated)
        cached = [(each.values_ENK, each.transposed_EKN, each.scale_ERC) for each in self._cached()]
        cached = cached or [(None, None, None)] * len(xs_ND)
        return [
            _Fp8GroupedLinear.apply(x_ND, counts_E, call, *rows, weight_EFD, *kept)  # pyright: ignore[reportReturnType]
            for x_ND, weight_EFD, kept in zip(xs_ND, weights_EFD, cached, strict=True)
        ]

    def cast(self, weights_EFD: Sequence[Tensor]) -> None:
        """Cast the current weights into the cache, where there is one."""
        if self.cached_weights:
            for cached, weight_EFD in zip(self._cached(), weights_EFD, strict=True):
                cached.cast(weight_EFD, self.options.amax_groups.weight)

    def _cached(self) -> list[CachedFp8Experts]:
        return list(self.cached_weights)  # pyright: ignore[reportReturnType]


class Fp8Call(NamedTuple):
    """What one fp8 grouped matmul needs beside tensors."""

    options: Fp8Options
    simulated: SimulatedDevice | None

    @property
    def recipe(self) -> Recipe:
        """The formats and blocks."""
        return RECIPES[self.options.recipe]


def quantise_rows(x_ND: Tensor, recipe: Recipe, groups: Groups = ()) -> Quantised:
    """x in E4M3 with scales of each row, or of its blocks; the groups shard the columns of x."""
    block = (1, x_ND.shape[1]) if recipe.token_block is None else recipe.token_block
    return quantise(x_ND, recipe.operand, block, groups)


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, counts_E: Tensor, call: Fp8Call, *tensors: Tensor) -> Tensor:
        values_ND, scale_NC, weight_EFD, cached_EFD, cached_EDF, scale_ERC = tensors
        if cached_EFD is None:
            scale_ERC = expert_scales(weight_EFD, call.recipe, call.options.amax_groups.weight)
            weight = encode_experts(weight_EFD, scale_ERC, call.recipe)
        else:
            weight = QuantisedExperts(cached_EFD, scale_ERC)
        ctx.save_for_backward(x_ND, weight_EFD, cached_EDF, scale_ERC, counts_E)
        ctx.call = call
        rows = Quantised(values_ND, scale_NC)
        return expert_matmul(rows, weight, counts_E, call, to=x_ND.dtype, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight_EFD, cached_EDF, scale_ERC, counts_E = ctx.saved_tensors
        call: Fp8Call = ctx.call
        dy_NF = dy_NF.contiguous()
        dy = quantise_rows(dy_NF, call.recipe, call.options.amax_groups.gradient)
        if cached_EDF is None:
            # From the weight: saved from forward it would keep gathered weights and undo ZeRO-3.
            cached_EDF = deferred_transposed_experts(weight_EFD, scale_ERC, call.recipe.operand, dy.values_MK)
        weight = QuantisedExperts(cached_EDF, scale_ERC.transpose(1, 2).contiguous())
        dx_ND = expert_matmul(dy, weight, counts_E, call, to=dy_NF.dtype)
        dweight_EFD = None
        if ctx.needs_input_grad[5]:
            dweight_EFD = grouped_weight_gradient(dy_NF, x_ND, counts_E, call.simulated).to(weight_EFD.dtype)
        return dx_ND, *(None,) * 4, dweight_EFD, *(None,) * 3


def expert_matmul(
    a: Quantised,
    b: QuantisedExperts,
    counts_E: Tensor,
    call: Fp8Call,
    *,
    to: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """The fp8 matmul, or the same of the dequantised values, which are exact in bf16 and fp32."""
    if call.options.native:
        return grouped_matmul(a, b, group_ends(counts_E), fast_accumulation=fast_accumulation)
    is_cuda = kernel_device(a.values_MK.device.type, call.simulated) == "cuda"
    dtype = torch.float64 if to == torch.float64 else torch.bfloat16 if is_cuda else torch.float32
    y_NF = grouped_linear(decode(a, dtype), decode_experts(b, dtype), counts_E, call.simulated)
    return cast(y_NF, to)
