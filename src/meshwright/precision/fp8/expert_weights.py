"""Stacked weights of routed experts in fp8: one scale per expert, or one per 128 x 128 values of it.

An expert's own scale costs nothing, because the grouped matmul takes a scale per column of every expert, and
experts that are trained on different tokens differ in their amax.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.cast import cast_experts_into
from meshwright.precision.fp8.quantise import Groups, all_reduce_amax, power_of_two_scale, saturating_cast
from meshwright.precision.fp8.recipes import RECIPES, Recipe


class QuantisedExperts(NamedTuple):
    """W[E, N, K] as fp8 values and their scales."""

    values_ENK: Tensor
    scale_ERC: Tensor
    """fp32, one per block: [E, 1, 1] with one scale per expert, else [E, N / 128, K / 128]."""


def expert_scales(weight_ENK: Tensor, recipe: Recipe, groups: Groups = ()) -> Tensor:
    """scale_ERC of weights, from their amax, all-reduced over the groups that shard an expert."""
    blocks = _in_blocks(weight_ENK, *_num_blocks(weight_ENK, recipe))
    # A norm, because it needs no copy of the magnitudes.
    amax_ERC = torch.linalg.vector_norm(blocks, torch.inf, dim=(2, 4)).float()
    return power_of_two_scale(all_reduce_amax(amax_ERC, groups), recipe.operand)


def encode_experts(weight_ENK: Tensor, scale_ERC: Tensor, recipe: Recipe) -> QuantisedExperts:
    """W in fp8 with given scales."""
    wide = torch.float64 if weight_ENK.dtype == torch.float64 else torch.float32
    blocks = _in_blocks(weight_ENK, *scale_ERC.shape[1:])
    scaled = blocks * scale_ERC.reciprocal().to(wide)[:, :, None, :, None]
    return QuantisedExperts(saturating_cast(scaled, recipe.operand).flatten(3, 4).flatten(1, 2), scale_ERC)


def decode_experts(weight: QuantisedExperts, dtype: torch.dtype) -> Tensor:
    """The dequantised values; exact in bf16, fp32 and fp64."""
    blocks = _in_blocks(weight.values_ENK.to(dtype), *weight.scale_ERC.shape[1:])
    return (blocks * weight.scale_ERC.to(dtype)[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)


def _num_blocks(weight_ENK: Tensor, recipe: Recipe) -> tuple[int, int]:
    if recipe.weight_block is None:
        return 1, 1
    return weight_ENK.shape[1] // recipe.weight_block[0], weight_ENK.shape[2] // recipe.weight_block[1]


def _in_blocks(weight_ENK: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """W as [E, R, N / R, C, K / C]."""
    return weight_ENK.unflatten(2, (num_columns, -1)).unflatten(1, (num_rows, -1))


@torch.library.custom_op("meshwright::fp8_deferred_transposed_experts", mutates_args=())
def deferred_transposed_experts(
    weight_ENK: Tensor, scale_ERC: Tensor, dtype: torch.dtype, after: Tensor
) -> Tensor:
    """W^T[E, K, N] in fp8, not before `after` exists: see `deferred_transpose`."""
    del after
    transposed_EKN = _empty_transposed(weight_ENK, dtype)
    values_ENK = torch.empty_like(weight_ENK, dtype=dtype)
    cast_experts_into(weight_ENK, scale_ERC, values_ENK, transposed_EKN)
    return transposed_EKN


@deferred_transposed_experts.register_fake
def _(weight_ENK: Tensor, scale_ERC: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    del scale_ERC, after
    return _empty_transposed(weight_ENK, dtype)


def _empty_transposed(weight_ENK: Tensor, dtype: torch.dtype) -> Tensor:
    num_experts, rows, columns = weight_ENK.shape
    return weight_ENK.new_empty((num_experts, columns, rows), dtype=dtype)


class CachedFp8Experts(nn.Module):
    """W[E, N, K] in fp8 from one update to the next, as it is and transposed: see `CachedFp8Weight`."""

    values_ENK: Tensor
    transposed_EKN: Tensor
    scale_ERC: Tensor

    def __init__(self, recipe: str, shape: torch.Size) -> None:
        super().__init__()
        self.recipe = RECIPES[recipe]
        weight_ENK = torch.empty(shape, device="meta")
        scale_shape = (shape[0], *_num_blocks(weight_ENK, self.recipe))
        # Not persistent: a checkpoint is complete without them.
        for name, buffer in (
            ("values_ENK", torch.zeros(shape, dtype=self.recipe.operand, device="meta")),
            ("transposed_EKN", _empty_transposed(weight_ENK, self.recipe.operand)),
            ("scale_ERC", torch.zeros(scale_shape, device="meta")),
        ):
            self.register_buffer(name, buffer, persistent=False)

    @torch.no_grad()
    def cast(self, weight_ENK: Tensor, groups: Groups = ()) -> None:
        """Cast the current weights; with groups one small all-reduce."""
        self.scale_ERC.copy_(expert_scales(weight_ENK, self.recipe, groups))
        cast_experts_into(weight_ENK, self.scale_ERC, self.values_ENK, self.transposed_EKN)
