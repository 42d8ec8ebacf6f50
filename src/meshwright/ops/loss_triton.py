"""The passes over rows of logits as Triton kernels: a program per row, its columns block by block.

Where the gradient needs no other rank's numbers, one read and one write of the logits give both statistics
and gradient: exponentials are written at once, relative to the highest logit seen so far, and what is
missing is a factor per row, 1 / sum, which the matrix products on both sides take along. Rows are read to the
end of their padding: a bound that is not a multiple of a vector splits every load and store into single
elements (measured: 1.1 TB/s for 50,257 columns, where 128,256 ran at 2.4).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.ops.loss_rows import RowKernels, Statistics, accumulate

BLOCK_COLUMNS = 8192
NUM_WARPS = 16
COPIED_ELEMENTS = 4096
# A logit may lie this far above the one that exponentials are relative to, before what is written is made
# smaller: e^40 times any vocabulary stays far below the end of bf16 and float32.
MARGIN = tl.constexpr(40.0)


@triton.jit
def _loss_statistics(
    logits,
    row_width,
    num_columns,
    targets,
    highest_out,
    sums_out,
    chosen_out,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    highest = -float("inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    is_here = (target >= 0) & (target < num_columns)
    chosen = tl.load(base + target, mask=is_here, other=0.0).to(tl.float32)
    tl.store(highest_out + row, highest)
    tl.store(sums_out + row, total)
    tl.store(chosen_out + row, chosen)


@triton.jit
def _loss_gradient(
    logits,
    row_width,
    num_columns,
    targets,
    weights,
    normalisers,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    normaliser = tl.load(normalisers + row)
    weight = tl.load(weights + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
        gradient = (tl.exp(x - normaliser) - tl.where(columns == target, 1.0, 0.0)) * weight
        gradient = tl.where(columns < num_columns, gradient, 0.0)
        tl.store(base + columns, gradient.to(logits.dtype.element_ty), mask=columns < row_width)


@triton.jit
def _loss_exponentials(
    logits,
    row_width,
    num_columns,
    targets,
    highest_out,
    sums_out,
    chosen_out,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    """logits <- exp(logits - highest) - [target] sum: the gradient but for the factor 1 / sum."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_width
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < num_columns)
    chosen = tl.load(base + target, mask=is_here, other=0.0).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < row_width, other=0.0).to(tl.float32)
    highest = tl.max(tl.where(columns < num_columns, x, -float("inf")), 0)
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_inside = columns < row_width
        x = tl.load(base + columns, mask=is_inside, other=0.0).to(tl.float32)
        x = tl.where(columns < num_columns, x, -float("inf"))
        higher = tl.max(x, 0)
        # Hardly ever: what is written already becomes relative to this one.
        if higher > highest + MARGIN:  # pyright: ignore[reportOperatorIssue]
            smaller = tl.exp(highest - higher)  # pyright: ignore[reportOperatorIssue]
            for past in range(0, start, BLOCK):
                written = base + past + tl.arange(0, BLOCK)
                tl.store(written, (tl.load(written).to(tl.float32) * smaller).to(logits.dtype.element_ty))
            totals *= smaller
            highest = higher
        x = tl.exp(x - highest)
        totals += x
        tl.store(base + columns, x.to(logits.dtype.element_ty), mask=is_inside)
    total = tl.sum(totals, 0)
    tl.debug_barrier()  # the target's place has been written by another thread
    tl.store(base + target, (tl.exp(chosen - highest) - total).to(logits.dtype.element_ty), mask=is_here)
    tl.store(highest_out + row, highest)
    tl.store(sums_out + row, total)
    tl.store(chosen_out + row, chosen)


@triton.jit
def _scaled_copy(
    out,
    x,
    factor,
    num_elements,
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < num_elements
    scaled = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + places, scaled.to(out.dtype.element_ty), mask=is_inside)


def scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a scalar, rounded once to `dtype`; for mixed dtypes torch took 11 ms of a step at 8B."""
    out = torch.empty_like(x, dtype=dtype)
    grid = (triton.cdiv(x.numel(), COPIED_ELEMENTS),)
    kernel: Any = _scaled_copy[grid]
    kernel(out, x, factor, x.numel(), BLOCK=COPIED_ELEMENTS)
    return out


def statistics(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """One read of the logits."""
    return _found_by(_loss_statistics, logits_TV, targets_T)


def to_gradient(logits_TV: Tensor, normalisers_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    """One read and one write: the logits are overwritten by the gradient of the weighted loss."""
    _launch(_loss_gradient, logits_TV, targets_T, weights_T, normalisers_T)


def unscaled_gradient(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """One read and one write. See `loss_rows`."""
    return _found_by(_loss_exponentials, logits_TV, targets_T)


def _found_by(kernel: Any, logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    out = Statistics(*torch.empty((3, len(logits_TV)), dtype=torch.float32, device=logits_TV.device))
    _launch(kernel, logits_TV, targets_T, *out)
    return out


def _launch(kernel: Any, logits_TV: Tensor, *others: Tensor) -> None:
    """Columns between those of the view and the end of the stored row are padding, zero before and after."""
    num_rows, num_columns = logits_TV.shape
    kernel[(num_rows,)](
        logits_TV, logits_TV.stride(0), num_columns, *others, BLOCK=BLOCK_COLUMNS, num_warps=NUM_WARPS
    )


TRITON = RowKernels(statistics, to_gradient, unscaled_gradient, accumulate)
