"""A transpose tile by tile, with coalesced reads and writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _transpose(source, target, num_rows, num_columns, TILE: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row, is_column = rows < num_rows, columns < num_columns
    tile = tl.load(
        source + rows[:, None] * num_columns + columns[None, :], mask=is_row[:, None] & is_column[None, :]
    )
    written = target + columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(written, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])


def transpose_tiles(x_MK: Tensor) -> Tensor:
    """x^T, contiguous, of any dtype: bits are copied."""
    num_rows, num_columns = x_MK.shape
    source = x_MK.contiguous().view(_BITS[x_MK.element_size()])
    target = torch.empty((num_columns, num_rows), dtype=source.dtype, device=x_MK.device)
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))
    _transpose[grid](
        source,
        target,
        num_rows,
        num_columns,
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return target.view(x_MK.dtype)
