"""Block-by-block compile: one graph serves all blocks of a kind, and ZeRO-3 collectives stay outside it."""

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.spec import MemorySpec


def compile_blocks(blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
    """Compile each block; where offload will wrap its forward, only that forward.

    A compiled module traces everything in its call, and copies to the host must stay outside the graph.
    """
    is_wrapped = not {"activations", "parameters"}.isdisjoint(memory.offload)
    for block in blocks:
        if is_wrapped:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()
