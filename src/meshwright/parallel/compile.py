"""Block-by-block compile: one graph serves all blocks of a kind, and ZeRO-3 collectives stay outside it.

The compiler passes over recompute (activation checkpointing) in which the host reads row counts of routed
experts, or a ring passes keys and values on. With `recompute: full` the parts of such a block are compiled
instead, inside the recompute: norms, attention, the MLP, or the router, the experts and the shared experts.
With `selective` the block stays uncompiled: its policy picks operators, and does not see those of a compiled
part.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.memory.recompute import is_recomputed
from meshwright.models.decoder import Block
from meshwright.models.layers.moe import Moe
from meshwright.parallel.cp.ring import passes_keys
from meshwright.parallel.ep import reads_row_counts
from meshwright.parallel.torch_constant_floats import with_constant_floats
from meshwright.spec import MemorySpec


class CompiledPart(NamedTuple):
    """A module whose forward becomes a graph of its own."""

    module: nn.Module
    has_varying_rows: bool = False
    """Whether the number of rows differs from call to call. Then the first graph serves every number: the
    recompute must run the graph that the forward ran."""

    def compile(self, compiler: Callable[..., Any], **options: Any) -> None:
        """Replace the forward by its compiled form."""
        compiled = compiler(self.module.forward, **options)
        self.module.forward = with_constant_floats(compiled) if self.has_varying_rows else compiled


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
    if isinstance(block.mlp, Moe) and reads_row_counts(block.mlp):
        rest = _parts_of_experts(block.mlp)
    elif passes_keys(block):
        rest = [CompiledPart(block.mlp)]
    else:
        return []
    return [*(CompiledPart(each) for each in (block.attention_norm, block.attention, block.mlp_norm)), *rest]


def _parts_of_experts(layer: Moe) -> list[CompiledPart]:
    """All but the exchange of rows and what decides about it."""
    shared = [] if layer.shared is None else [CompiledPart(layer.shared)]
    return [CompiledPart(layer.router), *shared, CompiledPart(layer.experts, has_varying_rows=True)]
