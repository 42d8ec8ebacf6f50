"""fp8 recipes as data: the formats of the operands and how many numbers share one scale."""

from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: the whole tensor does. The last dim is the contracted one."""


@dataclass(frozen=True)
class Recipe:
    """Weights and inputs are `operand`, gradients of outputs are `gradient`."""

    operand: torch.dtype
    gradient: torch.dtype
    token_block: Block
    """Of inputs and of gradients of outputs."""
    weight_block: Block
    needs: tuple[int, int]
    """The first CUDA compute capability whose matmul takes it; below, the product is emulated."""
    is_delayed: bool = False
    """Scales come from earlier steps instead of from the tensor at hand."""

    @property
    def block_size(self) -> int:
        """Along the contracted dim; every dim of a linear is a multiple of it. 16: the kernel's own need."""
        return 16 if self.token_block is None else self.token_block[1]


RECIPES = {
    "current": Recipe(E4M3, E5M2, None, None, needs=(8, 9)),
    "delayed": Recipe(E4M3, E5M2, None, None, needs=(8, 9), is_delayed=True),
    "blockwise": Recipe(E4M3, E4M3, (1, 128), (128, 128), needs=(9, 0)),
    "mxfp8": Recipe(E4M3, E4M3, (1, 32), (1, 32), needs=(10, 0)),
}
