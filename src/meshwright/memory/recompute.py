"""Recompute (activation checkpointing): free a block's activations after forward, recompute them in backward.

    full        saves x[B, S, D] at the input of the block; one more forward pass
    selective   also saves the outputs of matmuls, convolutions and attention; recomputes norms, activation
                functions and RoPE

Batch norm updates its running statistics in forward; the recomputed forward leaves them unchanged.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.memory.saved_tensors import SavedTensorStore, storing_contexts
from meshwright.memory.torch_checkpoint import ignore_profiler_ranges
from meshwright.models.layers.adapted_fp8 import STORED_ADAPTED_OPERATORS
from meshwright.ops.adapted_linear import ADAPTED_OPERATORS
from meshwright.ops.batch_norm import batch_norms
from meshwright.ops.fused_linear import FUSED_OPERATORS
from meshwright.ops.grouped_mm import EACH_GROUP_OPERATORS
from meshwright.ops.varlen_attention import VARLEN_OPERATORS
from meshwright.precision.fp8.grouped_matmul import FP8_GROUPED_OPERATORS
from meshwright.precision.fp8.matmul import FP8_OPERATORS
from meshwright.spec import MemorySpec

_aten = torch.ops.aten
# Expensive to recompute for the bytes they take; every other operator is cheap beside them.
_SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
    *FP8_OPERATORS,
    *FP8_GROUPED_OPERATORS,
    *EACH_GROUP_OPERATORS,
    *FUSED_OPERATORS,
    *ADAPTED_OPERATORS,
    *STORED_ADAPTED_OPERATORS,
    *VARLEN_OPERATORS,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
}


def apply_recompute(
    blocks: Iterable[nn.Module], memory: MemorySpec, *, store: SavedTensorStore | None = None
) -> None:
    """Recompute every k-th block; names and parameters of the blocks do not change.

    What selective recompute saves goes to `store`, where one is given; not for blocks that are compiled.
    """
    if memory.recompute == "none":
        return
    ignore_profiler_ranges()
    for index, block in enumerate(blocks):
        if is_recomputed(index, memory):
            block.forward = with_recompute(block.forward, memory, batch_norms(block), store)


def is_recomputed(index: int, memory: MemorySpec) -> bool:
    """Whether the block of this number on a stage is recomputed."""
    return memory.recompute != "none" and index % memory.recompute_every == 0


def with_recompute(
    forward: Callable[..., Any],
    memory: MemorySpec,
    norms: Sequence[nn.Module] = (),
    store: SavedTensorStore | None = None,
) -> Callable[..., Any]:
    """The same forward with recompute: random numbers repeat, and `norms` keep their running statistics.

    It is a plain function around `checkpoint`, because the compiler traces into a function and skips a
    partial: the block would silently stay uncompiled.
    """

    def full(*args: Any, **kwargs: Any) -> Any:
        # torch 2.11 saves the outputs of autograd functions unless a policy allows it to recompute them.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_full_contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def selective(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)

    def eager(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=eager_contexts, **kwargs)

    def eager_contexts() -> Any:
        if memory.recompute == "full":
            first, second = nullcontext(), nullcontext()
        else:
            first, second = _selective_contexts() if store is None else storing_contexts(_SAVED, store)
        return first, _both(_running_statistics_preserved(norms), second)

    if norms or (store is not None and memory.recompute == "selective"):
        return eager
    return full if memory.recompute == "full" else selective


@contextmanager
def _both(*contexts: Any) -> Generator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _running_statistics_preserved(norms: Sequence[nn.Module]) -> Generator[None]:
    """Inside, batch norms update copies of their running statistics, which are dropped.

    Copies rather than none at all: autograd saves them, and the recompute must save what forward saved.
    """
    buffers = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in buffers:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in buffers:
            setattr(norm, name, buffer)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_expensive)


def _full_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_nothing)


def _save_nothing(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_expensive(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
