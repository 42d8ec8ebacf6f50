"""The passes of the loss over rows of logits as Triton kernels: one program per row.

Where the gradient needs no other rank's values, one read and one write of the logits give both statistics and
gradient: exponentials are written at once, relative to the running max, and the missing factor 1 / sum per
row is applied by the matmuls on both sides. Rows are read to the end of their padding: a bound that is not a
multiple of a vector splits every load and store into single elements (measured: 1.1 TB/s for 50,257 columns,
where 128,256 ran at 2.4).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.ops.loss_rows import RowKernels, Statistics, accumulate

BLOCK_COLUMNS = 8192
NUM_WARPS = 16
COPY_BLOCK = 4096
# A logit may exceed the running max by this much before the exponentials written so far are rescaled: e^40
# times any vocabulary stays far below the largest bf16 and float32.
MARGIN = tl.constexpr(40.0)


@triton.jit
def _loss_statistics(
    logits,
    row_width,
    num_columns,
    targets,
    max_out,
    sum_exp_out,
    target_logit_out,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    row_max = -float("inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(x, 0))
        total = total * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max), 0)
        row_max = new_max
    is_local = (target >= 0) & (target < num_columns)
    target_logit = tl.load(base + target, mask=is_local, other=0.0).to(tl.float32)
    tl.store(max_out + row, row_max)
    tl.store(sum_exp_out + row, total)
    tl.store(target_logit_out + row, target_logit)


@triton.jit
def _loss_gradient(
    logits,
    row_width,
    num_columns,
    targets,
    weights,
    lses,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    lse = tl.load(lses + row)
    weight = tl.load(weights + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
        gradient = (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0)) * weight
        gradient = tl.where(columns < num_columns, gradient, 0.0)
        tl.store(base + columns, gradient.to(logits.dtype.element_ty), mask=columns < row_width)


@triton.jit
def _loss_exponentials(
    logits,
    row_width,
    num_columns,
    targets,
    max_out,
    sum_exp_out,
    target_logit_out,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    """logits <- exp(logits - max) - [target] sum: the gradient without the factor 1 / sum."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    is_local = (target >= 0) & (target < num_columns)
    target_logit = tl.load(base + target, mask=is_local, other=0.0).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
    row_max = tl.max(tl.where(columns < num_columns, x, -float("inf")), 0)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_inside = columns < row_width
        x = tl.load(base + columns, mask=is_inside, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf"))
        new_max = tl.max(x, 0)
        # Rare: rescale the exponentials written so far to the new max.
        if new_max > row_max + MARGIN:  # pyright: ignore[reportOperatorIssue]
            factor = tl.exp(row_max - new_max)  # pyright: ignore[reportOperatorIssue]
            for past in range(0, start, BLOCK):
                written = base + past + tl.arange(0, BLOCK)
                tl.store(written, (tl.load(written).to(tl.float32) * factor).to(logits.dtype.element_ty))
            totals *= factor
            row_max = new_max
        x = tl.exp(x - row_max)
        totals += x
        tl.store(base + columns, x.to(logits.dtype.element_ty), mask=is_inside)
    total = tl.sum(totals, 0)
    tl.debug_barrier()  # another thread has written the target's exponential
    tl.store(
        base + target, (tl.exp(target_logit - row_max) - total).to(logits.dtype.element_ty), mask=is_local
    )
    tl.store(max_out + row, row_max)
    tl.store(sum_exp_out + row, total)
    tl.store(target_logit_out + row, target_logit)


@triton.jit
def _scaled_copy(
    out,
    x,
    factor,
    num_elements,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_elements
    scaled = tl.load(x + offsets, mask=is_inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + offsets, scaled.to(out.dtype.element_ty), mask=is_inside)


def scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a scalar, rounded once to `dtype`; for mixed dtypes torch took 11 ms of a step at 8B."""
    out = torch.empty_like(x, dtype=dtype)
    grid = (triton.cdiv(x.numel(), COPY_BLOCK),)
    kernel: Any = _scaled_copy[grid]
    kernel(out, x, factor, x.numel(), BLOCK=COPY_BLOCK)
    return out


def statistics(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """The statistics of each row; one read of the logits."""
    return _launch_for_statistics(_loss_statistics, logits_TV, targets_T)


def to_gradient(logits_TV: Tensor, lse_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    """Overwrite the logits with the gradient of the weighted loss; one read and one write."""
    _launch(_loss_gradient, logits_TV, targets_T, weights_T, lse_T)


def unscaled_gradient(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """Overwrite the logits with the gradient of sum x loss (see `loss_rows`); one read and one write."""
    return _launch_for_statistics(_loss_exponentials, logits_TV, targets_T)


def _launch_for_statistics(kernel: Any, logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    out = Statistics(*torch.empty((3, len(logits_TV)), dtype=torch.float32, device=logits_TV.device))
    _launch(kernel, logits_TV, targets_T, *out)
    return out


def _launch(kernel: Any, logits_TV: Tensor, *others: Tensor) -> None:
    """Launch one program per row; columns from the view to the end of the stored row are zero padding."""
    num_rows, num_columns = logits_TV.shape
    kernel[(num_rows,)](
        logits_TV, logits_TV.stride(0), num_columns, *others, BLOCK=BLOCK_COLUMNS, num_warps=NUM_WARPS
    )


TRITON = RowKernels(statistics, to_gradient, unscaled_gradient, accumulate)
