"""Weights kept in fp8 from one update to the next, as they lie and turned.

They are a copy: whoever changes the weights writes it anew. It takes two bytes per weight and saves, in every
micro-batch, a pass for the largest magnitude, two casts and a turn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.precision.fp8.cast import write_cast
from meshwright.precision.fp8.quantise import quantise
from meshwright.precision.fp8.recipes import RECIPES, Block


class KeptWeight(nn.Module):
    """W[N, K] in fp8 by a recipe, of one weight or of several one below the other."""

    values_NK: Tensor
    unit: Tensor
    turned_KN: Tensor
    turned_unit: Tensor

    def __init__(self, recipe: str, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.rule = RECIPES[recipe]
        shape, shape_turned = (num_rows, num_columns), (num_columns, num_rows)
        block, dtype = self.rule.weight_block, self.rule.operand
        # Not part of the model: a checkpoint without them is complete.
        self._room("values_NK", shape, dtype)
        self._room("unit", _units(shape, block), torch.float32)
        self._room("turned_KN", shape_turned, dtype)
        self._room("turned_unit", _units(shape_turned, block), torch.float32)

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device="meta"), persistent=False)

    @torch.no_grad()
    def write(self, weights: Sequence[Tensor], unit: Tensor) -> None:
        """Cast the weights as they are now; `unit` is used where the whole tensor has one scale."""
        if self.rule.weight_block is None:
            num_rows = [len(weight) for weight in weights]
            places = zip(
                weights, self.values_NK.split(num_rows), self.turned_KN.split(num_rows, 1), strict=True
            )
            for weight, values, values_turned in places:
                write_cast(weight, unit, values, values_turned)
            self.unit.copy_(unit)
            self.turned_unit.copy_(unit)
            return
        stacked_NK = torch.cat(list(weights))
        straight = quantise(stacked_NK, self.rule.operand, self.rule.weight_block)
        turned = quantise(stacked_NK.t().contiguous(), self.rule.operand, self.rule.weight_block)
        for held, new in zip(self.buffers(), (*straight, *turned), strict=True):
            held.copy_(new)


def _units(shape: tuple[int, int], block: Block) -> tuple[int, ...]:
    return () if block is None else (shape[0], shape[1] // block[1])
