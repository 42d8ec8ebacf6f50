"""A transpose tile by tile, with coalesced reads and writes."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _transpose(source, target, num_rows, num_columns, TILE: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    start = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row, is_column = rows < num_rows, columns < num_columns
    tile = tl.load(
        source + start + rows[:, None] * num_columns + columns[None, :],
        mask=is_row[:, None] & is_column[None, :],
    )
    written = target + start + columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(written, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])


def transpose_tiles(x: Tensor) -> Tensor:
    """x^T of a matrix or of each of stacked ones, contiguous, of any dtype: bits are copied."""
    *stacked, num_rows, num_columns = x.shape
    source = x.contiguous().view(_BITS[x.element_size()])
    target = torch.empty((*stacked, num_columns, num_rows), dtype=source.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE), math.prod(stacked))
    _transpose[grid](
        source,
        target,
        num_rows,
        num_columns,
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return target.view(x.dtype)
