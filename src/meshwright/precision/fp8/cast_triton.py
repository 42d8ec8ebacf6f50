"""Cast to fp8, as is and transposed, tile by tile in one pass, with coalesced reads and writes.

A tile is written as it is, read back (from the cache) as bytes, and written transposed. A transpose in
registers would take single bytes out of the pairs that the hardware cast produces, and for that the ptxas of
Triton 3.6 generates wrong code on Hopper: it reads bytes of registers that are not written yet. The cast
itself saturates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8


@triton.jit
def _cast(  # noqa: PLR0913  # pyright: ignore[reportGeneralTypeIssues]
    source, scale, values, transposed, tile_amax,
    num_rows, num_columns, source_stride, values_stride, transposed_stride,
    FORMAT: tl.constexpr, WITH_AMAX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    is_inside = (index < num_rows - row)[:, None] & (index < num_columns - column)[None, :]
    at = source + (row * source_stride + column) + (index[:, None] * source_stride + index[None, :])
    x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    if WITH_AMAX:
        # A maximum passes over nan: count it as inf.
        amax = tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), axis=0)
        tl.store(tile_amax + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), amax)
    fp8 = (x * tl.div_rn(1.0, tl.load(scale))).to(FORMAT)  # the multiply is exact: a scale is a power of two
    at = values + (row * values_stride + column) + (index[:, None] * values_stride + index[None, :])
    tl.store(at, fp8.to(tl.uint8, bitcast=True), mask=is_inside)
    tl.debug_barrier()  # bytes that other threads of the block have written are read now
    written = tl.load(at, mask=is_inside, other=0)
    at = transposed + (column * transposed_stride + row)
    at += index[:, None] * transposed_stride + index[None, :]
    tl.store(at, tl.trans(written), mask=tl.trans(is_inside))


_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def cast_tiles(
    x_MK: Tensor, scale: Tensor, values_MK: Tensor, transposed_KM: Tensor, tile_amax: Tensor | None
) -> None:
    """Write x in fp8 and its transpose into given tensors, and the amax of each tile.

    The outputs may be columns of larger matrices.
    """
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    num_rows, num_columns = x_MK.shape
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))
    _cast[grid](
        x_MK,
        scale,
        values_MK.view(torch.uint8),
        transposed_KM.view(torch.uint8),
        tile_amax,
        num_rows,
        num_columns,
        x_MK.stride(0),
        values_MK.stride(0),
        transposed_KM.stride(0),
        FORMAT=_FORMATS[values_MK.dtype],
        WITH_AMAX=tile_amax is not None,
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
