"""The backward pass of GELU and the sum over rows of its output, as one Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of one program, which it processes a tile at a time.
PROGRAM_ROWS = 256
TILE_ROWS = 8
TILE_COLUMNS = 256
NUM_WARPS = 4


@triton.jit
def _gelu_backward(  # noqa: PLR0913  (a kernel takes its pointers one by one)
    dh,
    y,
    dy,
    sums,
    num_rows,
    width,
    NUM_TILES: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    ROWS: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    COLUMNS: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    totals = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(NUM_TILES):
        rows = (tl.program_id(0).to(tl.int64) * NUM_TILES + tile) * ROWS + tl.arange(0, ROWS)
        offsets = rows[:, None] * width + columns[None, :]
        is_inside = (rows < num_rows)[:, None] & is_column[None, :]
        g = tl.load(dh + offsets, mask=is_inside, other=0.0).to(tl.float32)
        x = tl.load(y + offsets, mask=is_inside, other=0.0).to(tl.float32)
        square = x * x
        twice_u = 1.5957691216057308 * x * (1.0 + 0.044715 * square)
        sigmoid = 1.0 / (1.0 + tl.exp(-twice_u))
        slope = sigmoid + x * sigmoid * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * square)
        g *= slope
        totals += g
        tl.store(dy + offsets, g.to(dy.dtype.element_ty), mask=is_inside)
    tl.store(sums + tl.program_id(0) * width + columns, tl.sum(totals, 0), mask=is_column)


def gelu_backward(dh_TF: Tensor, y_TF: Tensor) -> tuple[Tensor, Tensor]:
    """dy, and its sum over rows in float32. Both inputs are contiguous."""
    num_rows, width = y_TF.shape
    grid = (triton.cdiv(num_rows, PROGRAM_ROWS), triton.cdiv(width, TILE_COLUMNS))
    dy_TF = torch.empty_like(y_TF)
    sums = torch.empty((grid[0], width), dtype=torch.float32, device=y_TF.device)
    _gelu_backward[grid](
        dh_TF,
        y_TF,
        dy_TF,
        sums,
        num_rows,
        width,
        NUM_TILES=PROGRAM_ROWS // TILE_ROWS,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return dy_TF, sums.sum(0)
