"""Block-by-block compile: one graph serves all blocks of a kind, and ZeRO-3 collectives stay outside it.

The compiler passes over recompute (activation checkpointing) in which the host reads row counts of routed
experts. With `recompute: full` the parts of such a block are compiled instead, inside the recompute: norms,
attention, the router, the experts, and the shared experts. With `selective` the block stays uncompiled: its
policy picks operators, and does not see those of a compiled part.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.memory.recompute import is_recomputed
from meshwright.models.decoder import Block
from meshwright.models.layers.moe import Moe
from meshwright.parallel.ep import reads_row_counts
from meshwright.spec import MemorySpec


class CompiledPart(NamedTuple):
    """A module whose forward becomes a graph of its own."""

    module: nn.Module
    has_varying_rows: bool = False
    """Whether the number of rows differs from call to call. Then the first graph serves every number: the
    recompute must run the graph that the forward ran."""

    def compile(self, compiler: Callable[..., Any], **options: Any) -> None:
        """Replace the forward by its compiled form."""
        self.module.forward = compiler(self.module.forward, **options)


def compile_blocks(blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
    """Compile each block or its parts; where offload will wrap its forward, only that forward.

    A compiled module traces everything in its call, and copies to the host must stay outside the graph.
    """
    is_wrapped = not {"activations", "parameters"}.isdisjoint(memory.offload)
    for index, block in enumerate(blocks):
        parts = compiled_parts(block, memory, index)
        for part in parts:
            part.compile(torch.compile, dynamic=True if part.has_varying_rows else None)
        if parts:
            continue
        if is_wrapped:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()


def compiled_parts(block: nn.Module, memory: MemorySpec, index: int) -> list[CompiledPart]:
    """The parts that are compiled instead of the block of this number; none: the block is one graph."""
    if memory.recompute != "full" or not is_recomputed(index, memory) or not isinstance(block, Block):
        return []
    layer = block.mlp
    if not isinstance(layer, Moe) or not reads_row_counts(layer):
        return []
    shared = [] if layer.shared is None else [layer.shared]
    modules = [block.attention_norm, block.attention, block.mlp_norm, layer.router, *shared]
    return [
        *(CompiledPart(module) for module in modules),
        CompiledPart(layer.experts, has_varying_rows=True),
    ]
