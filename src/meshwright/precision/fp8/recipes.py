"""fp8 recipes as data: the formats of the operands and how many values share one scale."""

from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: one scale for the full tensor. The last dim is contracted."""


@dataclass(frozen=True)
class Recipe:
    """How one kind of fp8 linear casts its operands."""

    operand: torch.dtype
    """Format of weights and inputs."""
    gradient: torch.dtype
    """Format of the gradients of outputs."""
    token_block: Block
    """Block of inputs and of the gradients of outputs."""
    weight_block: Block
    min_capability: tuple[int, int]
    """The first CUDA compute capability whose GEMM takes it; on older devices the GEMM is emulated."""
    is_delayed: bool = False
    """Whether scales come from earlier steps instead of from the tensor that is cast."""


RECIPES = {
    "current": Recipe(E4M3, E5M2, None, None, min_capability=(8, 9)),
    "delayed": Recipe(E4M3, E5M2, None, None, min_capability=(8, 9), is_delayed=True),
    "blockwise": Recipe(E4M3, E4M3, (1, 128), (128, 128), min_capability=(9, 0)),
    "mxfp8": Recipe(E4M3, E4M3, (1, 32), (1, 32), min_capability=(10, 0)),
}
