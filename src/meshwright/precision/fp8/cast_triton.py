"""Numbers to fp8, as they lie and turned, tile by tile in one pass: read once, written in whole lines.

Numbers are scaled in the format they come in: a unit is a power of two, so that this is exact. In fp32 the
compiler would turn the tile before it widens it and do everything twice, with three times the registers.
The cast of the hardware saturates, as the plain one does.
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
    FORMAT: tl.constexpr, BITS: tl.constexpr, WITHOUT_SIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_inside = (rows < num_rows - row)[:, None] & (columns < num_columns - column)[None, :]
    at = source + (row * source_stride + column) + (rows[:, None] * source_stride + columns[None, :])
    x = tl.load(at, mask=is_inside, other=0.0)
    if WITHOUT_SIGN > 0:
        # As integers, magnitudes have the order of the numbers, and what is not a number is the largest.
        bits = tl.max(tl.max(x.to(BITS, bitcast=True) & WITHOUT_SIGN, axis=1), axis=0)
        bits = bits.to(BITS)  # pyright: ignore[reportAttributeAccessIssue]  (one maximum, no place of it)
        place = largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(place, bits.to(x.dtype, bitcast=True).to(tl.float32))
    inverse = tl.div_rn(1.0, tl.load(unit)).to(x.dtype)
    narrow = (x * inverse).to(FORMAT).to(tl.uint8, bitcast=True)
    at = values + (row * values_stride + column) + (rows[:, None] * values_stride + columns[None, :])
    tl.store(at, narrow, mask=is_inside)
    at = turned + (column * turned_stride + row) + (columns[:, None] * turned_stride + rows[None, :])
    tl.store(at, tl.trans(narrow), mask=tl.trans(is_inside))


_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_BITS = {torch.bfloat16: (tl.int16, 0x7FFF), torch.float32: (tl.int32, 0x7FFFFFFF)}


def cast_tiles(
    x_MK: Tensor, unit: Tensor, values_MK: Tensor, turned_KM: Tensor, largest: Tensor | None
) -> None:
    """Write x in fp8 into both, which may be columns of wider matrices, and each tile's largest magnitude."""
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    num_rows, num_columns = x_MK.shape
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))
    bits, without_sign = _BITS[x_MK.dtype]
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
        BITS=bits,
        WITHOUT_SIGN=0 if largest is None else without_sign,
        ROWS=TILE,
        COLUMNS=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (of the launch, not of the kernel)
    )
