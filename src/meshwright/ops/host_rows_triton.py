"""Reads rows of a table in pinned host memory with one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _read_rows(table, ids, out, width, BLOCK: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    token = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + token * width + columns, mask=is_inside)
    tl.store(out + row * width + columns, values, mask=is_inside)


def read_host_rows(table_VD: Tensor, ids: Tensor) -> Tensor:
    """table[ids] on the device of the ids; the table is contiguous."""
    width = table_VD.shape[1]
    out = ids.new_empty((*ids.shape, width), dtype=table_VD.dtype)
    _read_rows[(ids.numel(), triton.cdiv(width, BLOCK_COLUMNS))](
        table_VD,
        ids.contiguous(),
        out,
        width,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return out
