"""A grouped matmul of fp8 operands with scales of 128-blocks.

    y[m, n] = sum over blocks c of scale_a[c, m] scale_b[e, n / 128, c] sum over k in c of a[m, k] b[e, n, k]

One program computes a tile of one expert's rows. Tensor cores sum inside a block of 128; the scaled sums of
blocks are added in fp32. Where an expert's rows end inside a tile, the rest of the tile is computed and not
written: no rows are padded in memory, and the host need not know the counts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
TILE_ROWS = 128
NUM_WARPS, NUM_STAGES = 8, 4


@triton.jit
def _grouped(  # noqa: PLR0913  # pyright: ignore[reportGeneralTypeIssues]
    a, b, scale_a, scale_b, ends, y, num_rows, num_columns, depth, num_experts,
    EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Tiles of columns follow each other: they read the same rows of `a`.
    column_tiles, blocks = num_columns // BLOCK, depth // BLOCK
    tile, column = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    index = tl.arange(0, EXPERTS)
    is_expert = index < num_experts
    stops = tl.load(ends + index, mask=is_expert, other=0)
    starts = tl.load(ends + index - 1, mask=is_expert & (index > 0), other=0)
    tiles = (stops - starts + TILE_ROWS - 1) // TILE_ROWS
    tile_stops = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tile_stops <= tile).to(tl.int32), axis=0)
    if expert < num_experts:  # the host launches as many tiles as there can be
        is_mine = index == expert
        first = tl.sum(tl.where(is_mine, starts + (tile - tile_stops + tiles) * TILE_ROWS, 0), axis=0)
        stop = tl.sum(tl.where(is_mine, stops, 0), axis=0)
        rows = first + tl.arange(0, TILE_ROWS)
        read_rows = tl.minimum(rows, stop - 1)  # pyright: ignore[reportOperatorIssue]
        columns, inner = column * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        at_a = a + read_rows.to(tl.int64)[:, None] * depth + inner[None, :]
        at_b = b + expert.to(tl.int64) * num_columns * depth + columns[None, :] * depth + inner[:, None]
        at_scale_a = scale_a + read_rows
        at_scale_b = scale_b + (expert * column_tiles + column) * blocks
        total = tl.zeros((TILE_ROWS, BLOCK), dtype=tl.float32)
        for block in range(blocks):
            scale = tl.load(at_scale_a + block * num_rows) * tl.load(at_scale_b + block)
            total += tl.dot(tl.load(at_a), tl.load(at_b)) * scale[:, None]
            at_a += BLOCK
            at_b += BLOCK
        at_y = y + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(at_y, total.to(y.dtype.element_ty), mask=(rows < stop)[:, None])


def grouped_block_kernel(
    a_MK: Tensor, b_ENK: Tensor, scale_CM: Tensor, scale_ERC: Tensor, ends_E: Tensor, y_MN: Tensor
) -> None:
    """Write y of contiguous operands; N and K are multiples of 128."""
    num_experts, num_columns, depth = b_ENK.shape
    num_tiles = triton.cdiv(len(a_MK), TILE_ROWS) + num_experts  # one partial tile for each expert
    _grouped[(num_tiles * (num_columns // BLOCK),)](
        a_MK.contiguous(),
        b_ENK.contiguous(),
        scale_CM,
        scale_ERC,
        ends_E.to(torch.int32),
        y_MN,
        len(a_MK),
        num_columns,
        depth,
        num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        TILE_ROWS=TILE_ROWS,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (options of the launch)
        num_stages=NUM_STAGES,  # pyright: ignore[reportCallIssue]
    )
