"""Cast of stacked matrices (routed experts) to fp8, as they are and transposed, tile by tile in one pass.

The kernel is that of `cast_triton` with a matrix index and a scale for each tile, and without the amax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8


@triton.jit
def _cast(  # noqa: PLR0913  # pyright: ignore[reportGeneralTypeIssues]
    source, scale, values, transposed,
    num_rows, num_columns, source_stride, source_matrix_stride,
    scale_matrix_stride, scale_row_stride, scale_column_stride,
    FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    source, values = source + matrix * source_matrix_stride, values + matrix * num_rows * num_columns
    transposed += matrix * num_rows * num_columns
    scale += matrix * scale_matrix_stride
    scale += tl.program_id(0) * scale_row_stride + tl.program_id(1) * scale_column_stride
    row, column = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    is_inside = (index < num_rows - row)[:, None] & (index < num_columns - column)[None, :]
    at = source + (row * source_stride + column) + (index[:, None] * source_stride + index[None, :])
    x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    fp8 = (x * tl.div_rn(1.0, tl.load(scale))).to(FORMAT)  # the multiply is exact: a scale is a power of two
    at = values + (row * num_columns + column) + (index[:, None] * num_columns + index[None, :])
    tl.store(at, fp8.to(tl.uint8, bitcast=True), mask=is_inside)
    tl.debug_barrier()  # bytes that other threads of the block have written are read now
    written = tl.load(at, mask=is_inside, other=0)
    at = transposed + (column * num_rows + row)
    at += index[:, None] * num_rows + index[None, :]
    tl.store(at, tl.trans(written), mask=tl.trans(is_inside))


_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def cast_expert_tiles(
    weight_ENK: Tensor, scale_ERC: Tensor, values_ENK: Tensor, transposed_EKN: Tensor
) -> None:
    """Write stacked matrices in fp8 and their transposes into given contiguous tensors.

    A matrix has one scale, or one for each tile.
    """
    weight_ENK = weight_ENK if weight_ENK.stride(2) == 1 else weight_ENK.contiguous()
    num_matrices, num_rows, num_columns = weight_ENK.shape
    strides = (
        stride if size > 1 else 0 for stride, size in zip(scale_ERC.stride(), scale_ERC.shape, strict=True)
    )
    _cast[(triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE), num_matrices)](
        weight_ENK,
        scale_ERC,
        values_ENK.view(torch.uint8),
        transposed_EKN.view(torch.uint8),
        num_rows,
        num_columns,
        weight_ENK.stride(1),
        weight_ENK.stride(0),
        *strides,
        FORMAT=_FORMATS[values_ENK.dtype],
        TILE=TILE,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
