"""Numbers to fp8, as they lie and turned, tile by tile in one pass: read once, written in whole lines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8


@triton.jit
def _cast(  # noqa: PLR0913  # pyright: ignore[reportGeneralTypeIssues]
    source, unit, values, turned, largest,
    num_rows, num_columns, source_stride, values_stride, turned_stride,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, NOTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x = tl.load(source + rows[:, None] * source_stride + columns[None, :], mask=is_inside, other=0.0)
    x = x.to(tl.float32)
    if NOTES:
        # What is not a number must not be lost in a maximum that passes over it.
        seen = tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), axis=0)
        tl.store(largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), seen)
    scaled = x * tl.div_rn(1.0, tl.load(unit))  # exact: a unit is a power of two
    scaled = tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
    narrow = scaled.to(FORMAT).to(tl.uint8, bitcast=True)
    tl.store(values + rows[:, None] * values_stride + columns[None, :], narrow, mask=is_inside)
    turned_at = turned + columns[:, None] * turned_stride + rows[None, :]
    tl.store(turned_at, tl.trans(narrow), mask=tl.trans(is_inside))


_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def cast_tiles(
    x_MK: Tensor, unit: Tensor, values_MK: Tensor, turned_KM: Tensor, largest: Tensor | None
) -> None:
    """Write x in fp8 into both, which may be columns of wider matrices, and each tile's largest magnitude."""
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    num_rows, num_columns = x_MK.shape
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))
    _cast[grid](
        x_MK,
        unit,
        values_MK.view(torch.uint8),
        turned_KM.view(torch.uint8),
        largest,
        num_rows,
        num_columns,
        x_MK.stride(0),
        values_MK.stride(0),
        turned_KM.stride(0),
        LIMIT=torch.finfo(values_MK.dtype).max,
        FORMAT=_FORMATS[values_MK.dtype],
        NOTES=largest is not None,
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (of the launch, not of the kernel)
    )
