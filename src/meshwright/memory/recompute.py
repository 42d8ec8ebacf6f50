"""Recompute: forget a block's inner activations after forward and make them again in backward.

full        keeps x[B, S, D] at the entry of the block; one more forward pass
selective   keeps also what matmuls and attention put out; recomputes norms, activations and rotations
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.precision.fp8.matmul import OPERATORS
from meshwright.spec import MemorySpec

_aten = torch.ops.aten
# Costly to make again for the bytes they take; every other operator is cheap beside them.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    *OPERATORS,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
}


def apply_recompute(blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
    """Every k-th block forgets; names and parameters of the blocks do not change."""
    if memory.recompute == "none":
        return
    for index, block in enumerate(blocks):
        if index % memory.recompute_every == 0:
            block.forward = recomputed(block.forward, memory)


def recomputed(forward: Callable[..., Any], memory: MemorySpec) -> Callable[..., Any]:
    """The same function; random numbers are drawn alike the second time.

    A plain function around `checkpoint`, because the compiler looks into that and passes over a partial:
    the block would silently stay uncompiled.
    """

    def full(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def selective(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    return full if memory.recompute == "full" else selective


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
