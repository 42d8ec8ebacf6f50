"""Numbers to fp8, as they lie and turned, tile by tile in one pass: read once, written in whole lines.

A tile is written as it lies, read back (from the cache) as bytes, and written turned. Turned in registers,
single bytes are taken out of pairs that the hardware's cast has made, and for that the ptxas of Triton 3.6
makes wrong code on Hopper: bytes of registers that were not written yet. The cast itself saturates.
"""

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
    FORMAT: tl.constexpr, NOTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    is_inside = (index < num_rows - row)[:, None] & (index < num_columns - column)[None, :]
    at = source + (row * source_stride + column) + (index[:, None] * source_stride + index[None, :])
    x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    if NOTES:
        # What is not a number must not be lost in a maximum that passes over it.
        seen = tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), axis=0)
        tl.store(largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), seen)
    narrow = (x * tl.div_rn(1.0, tl.load(unit))).to(FORMAT)  # the product is exact: a unit is a power of two
    at = values + (row * values_stride + column) + (index[:, None] * values_stride + index[None, :])
    tl.store(at, narrow.to(tl.uint8, bitcast=True), mask=is_inside)
    tl.debug_barrier()  # what other threads of the block have written is read now
    again = tl.load(at, mask=is_inside, other=0)
    at = turned + (column * turned_stride + row) + (index[:, None] * turned_stride + index[None, :])
    tl.store(at, tl.trans(again), mask=tl.trans(is_inside))


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
        FORMAT=_FORMATS[values_MK.dtype],
        NOTES=largest is not None,
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (of the launch, not of the kernel)
    )
