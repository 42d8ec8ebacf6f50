"""What torch's selective activation checkpointing has no public setting for.

Torch compares the operators of both forward passes, except those in `SAC_IGNORED_OPS`. FSDP records more
profiler ranges in the second pass than in the first where it wraps a part of a block (routed experts), and
torch 2.13 takes that for another computation. The operators of profiler ranges are private.

Torch's compiler warns, by a private logger and on every rank, that a block must not write in place where a
policy is given. Our blocks do not.
"""

import logging

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS


def ignore_profiler_ranges() -> None:
    """Let profiler ranges differ between the two forward passes: they compute nothing."""
    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        (
            profiler._record_function_enter.default,
            profiler._record_function_enter_new.default,
            profiler._record_function_exit.default,
            profiler._record_function_exit._RecordFunction,
        )
    )


def silence_in_place_warning() -> None:
    """Drop the compiler's warning about in-place writes under a recompute policy."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_other_message)


def _is_other_message(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
