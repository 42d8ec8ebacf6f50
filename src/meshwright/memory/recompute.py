"""Recompute: forget a block's inner activations after forward and make them again in backward.

full        keeps x[B, S, D] at the entry of the block; one more forward pass
selective   keeps also what matmuls, convolutions and attention put out; recomputes norms, activations and
            rotations

Batch norm moves its running statistics in forward; the second forward leaves them alone.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.memory.saved_tensors import Keeper, keeping_contexts
from meshwright.ops.batch_norm import batch_norms
from meshwright.ops.fused_linear import JOINT_OPERATORS
from meshwright.precision.fp8.matmul import OPERATORS
from meshwright.spec import MemorySpec

_aten = torch.ops.aten
# Costly to make again for the bytes they take; every other operator is cheap beside them.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
    *OPERATORS,
    *JOINT_OPERATORS,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
}

# Marks for a profiler compute nothing. FSDP makes more of them in the second pass than in the first where it
# wraps a part of a block (routed experts), which torch 2.13 would take for another computation.
SAC_IGNORED_OPS.update(
    (
        torch.ops.profiler._record_function_enter.default,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


def apply_recompute(blocks: Iterable[nn.Module], memory: MemorySpec, *, keeper: Keeper | None = None) -> None:
    """Every k-th block forgets; names and parameters of the blocks do not change.

    What selective recompute keeps is left to a keeper, where there is one; not for blocks to be compiled.
    """
    if memory.recompute == "none":
        return
    for index, block in enumerate(blocks):
        if index % memory.recompute_every == 0:
            block.forward = recomputed(block.forward, memory, batch_norms(block), keeper)


def vouch_for_blocks() -> None:
    """Say that blocks write nothing in place, of which torch's compiler would warn on every rank."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def recomputed(
    forward: Callable[..., Any],
    memory: MemorySpec,
    norms: Sequence[nn.Module] = (),
    keeper: Keeper | None = None,
) -> Callable[..., Any]:
    """The same function; random numbers are drawn alike the second time, and `norms` take no notice of it.

    A plain function around `checkpoint`, because the compiler looks into that and passes over a partial:
    the block would silently stay uncompiled.
    """

    def full(*args: Any, **kwargs: Any) -> Any:
        # torch 2.11 keeps what autograd functions put out, unless a policy says that it may compute it again.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_nothing_kept, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def selective(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    def eager(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=eager_contexts, **kwargs)

    def eager_contexts() -> Any:
        if memory.recompute == "full":
            first, second = nullcontext(), nullcontext()
        else:
            first, second = _contexts() if keeper is None else keeping_contexts(_KEPT, keeper)
        return first, _both(_statistics_held(norms), second)

    if norms or (keeper is not None and memory.recompute == "selective"):
        return eager
    return full if memory.recompute == "full" else selective


@contextmanager
def _both(*contexts: Any) -> Generator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _statistics_held(norms: Sequence[nn.Module]) -> Generator[None]:
    """What batch norms add to their running statistics goes to copies, which are forgotten.

    Copies rather than none at all: autograd keeps them, and recompute must keep what forward kept.
    """
    kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _nothing_kept() -> Any:
    return create_selective_checkpoint_contexts(_always_again)


def _always_again(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
