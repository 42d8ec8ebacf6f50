"""Weights cached in fp8 from one update to the next, as they are and transposed.

The cache is a copy: whatever changes the weights must cast them again. It takes two bytes per weight and
saves, in every micro-batch, a pass for the amax, two casts and a transpose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.cast import cast_into
from meshwright.precision.fp8.quantise import quantise
from meshwright.precision.fp8.recipes import RECIPES, Block


class CachedFp8Weight(nn.Module):
    """W[N, K] in fp8, of one weight or of several concatenated by rows."""

    values_NK: Tensor
    scale: Tensor
    transposed_KN: Tensor
    transposed_scale: Tensor

    def __init__(self, recipe: str, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.recipe = RECIPES[recipe]
        shape, transposed = (num_rows, num_columns), (num_columns, num_rows)
        block, dtype = self.recipe.weight_block, self.recipe.operand
        # Not persistent: a checkpoint is complete without them.
        self._register("values_NK", shape, dtype)
        self._register("scale", _scale_shape(shape, block), torch.float32)
        self._register("transposed_KN", transposed, dtype)
        self._register("transposed_scale", _scale_shape(transposed, block), torch.float32)

    def _register(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device="meta"), persistent=False)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W and its scale, W^T and its scale."""
        return self.values_NK, self.scale, self.transposed_KN, self.transposed_scale

    @torch.no_grad()
    def cast(self, weights: Sequence[Tensor], scale: Tensor) -> None:
        """Cast the current weights; `scale` applies where the full tensor has one scale."""
        if self.recipe.weight_block is None:
            num_rows = [len(weight) for weight in weights]
            outputs = self.values_NK.split(num_rows), self.transposed_KN.split(num_rows, 1)
            for weight, values, transposed in zip(weights, *outputs, strict=True):
                cast_into(weight, scale, values, transposed)
            self.scale.copy_(scale)
            self.transposed_scale.copy_(scale)
            return
        weight_NK = torch.cat(list(weights))
        plain = quantise(weight_NK, self.recipe.operand, self.recipe.weight_block)
        transposed = quantise(weight_NK.t().contiguous(), self.recipe.operand, self.recipe.weight_block)
        for cached, new in zip(self.buffers(), (*plain, *transposed), strict=True):
            cached.copy_(new)


def _scale_shape(shape: tuple[int, int], block: Block) -> tuple[int, ...]:
    return () if block is None else (shape[0], shape[1] // block[1])
