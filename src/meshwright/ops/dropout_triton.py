"""Dropout by a hash of row and feature, as one Triton kernel: the function of `ops/dropout.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 4
TILE_COLUMNS = 512
NUM_WARPS = 4


@triton.jit
def _drop(  # noqa: PLR0913  (a kernel takes its arguments one by one)
    x,
    keys,
    y,
    num_rows,
    width,
    first_feature,
    threshold,
    scale,
    ROWS: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    COLUMNS: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.load(keys + rows, mask=rows < num_rows, other=0)
    low, high = key.to(tl.uint32)[:, None], (key >> 32).to(tl.uint32)[:, None]
    z = (columns + first_feature).to(tl.uint32)[None, :] ^ low
    z = (z ^ (z >> 16)) * 0x7FEB352D + high
    z = (z ^ (z >> 15)) * 0x846CA68B
    is_kept = z.to(tl.int32, bitcast=True) >= threshold
    offsets = rows[:, None] * width + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    value = tl.load(x + offsets, mask=is_inside, other=0.0).to(tl.float32) * scale
    tl.store(y + offsets, tl.where(is_kept, value, 0.0).to(y.dtype.element_ty), mask=is_inside)


def drop_kernel(x: Tensor, keys: Tensor, first_feature: int, threshold: int, scale: float) -> Tensor:
    """drop(x) of a contiguous x; `threshold` is the least hash of an element that is kept."""
    y, width = torch.empty_like(x), x.shape[-1]
    num_rows = keys.numel()
    grid = (triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS))
    if not num_rows:  # an expert's rank may get no rows
        return y
    _drop[grid](
        x,
        keys,
        y,
        num_rows,
        width,
        first_feature,
        threshold,
        scale,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return y
