"""Seconds of softmax(q k) v of one layer: which kernel our runtime runs, and its rate.

    documents  window    kernel                                   rates
    joined     none      cuDNN (fp8-capable devices), else flash  CUDNN, FLASH
    joined     given     two causal calls of cuDNN in compiled    CUDNN, and the merge of both results
                         blocks, else flash
    separate   any       flash over segments (varlen)             SEGMENTS
    separate, fp32 or dropout: a mask, and no pair is skipped     FLASH

Measured on one H200: docs/decisions/2026-11-16-attention-kernels.md.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Device
from meshwright.plan.time.kernels import KERNEL_SECONDS, copy_rate
from meshwright.plan.workload.layouts import CP_KINDS, Floats, Layouts
from meshwright.plan.workload.operators import attention_core_flops
from meshwright.plan.workload.workload import Workload

# FLOPs of the backward kernel over those of the forward kernel, which it partly recomputes.
BACKWARD_FLOPS = 2.5
# Bytes of q per token that splitting and merging the two calls of a window move, in reads and writes of it.
WINDOW_PASSES = (9.0, 15.0)


@dataclass(frozen=True)
class AttentionRates:
    """Rate of an attention kernel against the device's best matmul, at head width 128."""

    forward: float
    backward: float
    half_rate_length: float
    """Length of a sequence or document at which the kernel reaches half of its rate."""


FLASH = AttentionRates(0.68, 0.56, 384.0)
CUDNN = AttentionRates(0.99, 0.82, 1300.0)
SEGMENTS = AttentionRates(0.65, 0.62, 1700.0)


def kernel_seconds(
    flops: Floats, workload: Workload, device: Device, rates: AttentionRates, *, length: float
) -> tuple[Floats, Floats]:
    """Forward and backward of a kernel whose rate falls with narrow heads and short sequences."""
    attention = workload.model.attention
    width = 0.5 * (attention.head_width + attention.value_width)
    shape = min(1.25 * width / (width + 32.0) * length / (length + rates.half_rate_length), 1.1)
    ceiling = device.matmul_ceiling(workload.activation_precision)
    measured = device.best_attention_flops_per_second
    # A measured rate is that of the fastest kernel for long joined sequences, over both passes.
    scale = measured / _both(_fastest(device)) if measured else ceiling
    forward = KERNEL_SECONDS + flops / (rates.forward * scale * shape)
    return forward, KERNEL_SECONDS + BACKWARD_FLOPS * flops / (rates.backward * scale * shape)


def _both(rates: AttentionRates) -> float:
    """The rate over forward and backward."""
    return (1.0 + BACKWARD_FLOPS) / (1.0 / rates.forward + BACKWARD_FLOPS / rates.backward)


def _fastest(device: Device) -> AttentionRates:
    """The kernel for joined sequences: cuDNN's from Hopper on, where it is the faster one."""
    return CUDNN if _is_hopper_or_later(device) else FLASH


def _is_hopper_or_later(device: Device) -> bool:
    return "fp8" in device.peak_flops_per_second


def runtime_attention_seconds(workload: Workload, at: Layouts, device: Device) -> tuple[Floats, Floats]:
    """Forward and backward of one layer on our runtime, for the cp rank with the most pairs."""
    flops, length = attention_core_flops(workload, at), float(workload.sequence_length)
    if workload.has_mask and device.name != "cpu":
        seen = workload.sequence_length / workload.keys_seen
        return kernel_seconds(seen * flops, workload, device, FLASH, length=length)
    window = workload.window
    if workload.documents is not None:
        return _segments_seconds(flops, workload, at, device)
    if window is None:
        return kernel_seconds(flops, workload, device, _fastest(device), length=length)
    if not workload.compiled or workload.sequence_length % window:
        return kernel_seconds(flops, workload, device, _segments(device), length=float(window))
    calls = kernel_seconds(flops, workload, device, _fastest(device), length=2.0 * window)
    attention = workload.model.attention
    query = workload.working_bytes * attention.num_heads * attention.head_width / at.tp
    moved = at.microbatch_tokens(workload.sequence_length) * query / copy_rate(device)
    return calls[0] + WINDOW_PASSES[0] * moved, calls[1] + WINDOW_PASSES[1] * moved


def _segments(device: Device) -> AttentionRates:
    """Flash over segments; before Hopper it is the kernel that joined sequences run in too."""
    return SEGMENTS if _is_hopper_or_later(device) else FLASH


def _segments_seconds(
    flops: Floats, workload: Workload, at: Layouts, device: Device
) -> tuple[Floats, Floats]:
    documents, attention = workload.documents, workload.model.attention
    assert documents is not None
    # Values are padded to the width of queries and keys (MLA).
    padded = 2.0 * attention.head_width / (attention.head_width + attention.value_width)
    is_by_heads = at.cp_kind == CP_KINDS.index("ulysses")
    slowest = np.where(is_by_heads, 1.0, documents.slowest_rank(at.cp, at.cp_stripes))
    length = min(documents.mean_of_tokens, workload.window or documents.mean_of_tokens)
    return kernel_seconds(padded * slowest * flops, workload, device, _segments(device), length=length)
