"""Compile, block by block: one graph serves all alike blocks, and collectives of ZeRO-3 stay outside."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshwright.spec import MemorySpec


def compile_blocks(blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
    """Compile each block; where offload will wrap its forward, that forward alone.

    A compiled module looks into everything its call does, and copies to the host are no part of a graph.
    """
    is_wrapped = not {"activations", "parameters"}.isdisjoint(memory.offload)
    for block in blocks:
        if is_wrapped:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()


def num_compiled_graphs() -> int:
    """Graphs that torch's compiler has made in this process; it says so in a private counter only."""
    dynamo: Any = torch._dynamo
    return dynamo.utils.counters["stats"]["unique_graphs"]
