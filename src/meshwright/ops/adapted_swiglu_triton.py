"""The forward pass of `adapted_swiglu` as one Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANKS = 128
"""Ranks of gate and up together that fit a program's registers."""
BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 64, 64, 4
MIN_RANKS = 16
"""What tensor cores take at least; fewer ranks are padded with zeros."""


@triton.jit
def _add_and_activate(  # noqa: PLR0913 - a kernel  # pyright: ignore[reportGeneralTypeIssues]
    plain,
    y,
    u,
    b,
    h,
    num_rows,
    width,
    num_ranks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANKS)
    has_row, has_column, has_rank = rows < num_rows, columns < width, ranks < num_ranks
    u_tile = tl.load(
        u + rows[:, None] * num_ranks + ranks[None, :], mask=has_row[:, None] & has_rank[None, :], other=0.0
    )
    of_b = columns[None, :] * num_ranks + ranks[:, None]
    has_b = has_rank[:, None] & has_column[None, :]
    gate_b = tl.load(b + of_b, mask=has_b, other=0.0)
    up_b = tl.load(b + of_b + width * num_ranks, mask=has_b, other=0.0)
    left = rows[:, None] * (2 * width) + columns[None, :]
    is_inside = has_row[:, None] & has_column[None, :]
    gate = tl.load(plain + left, mask=is_inside, other=0.0).to(tl.float32) + tl.dot(u_tile, gate_b)
    up = tl.load(plain + left + width, mask=is_inside, other=0.0).to(tl.float32) + tl.dot(u_tile, up_b)
    # Backward reads y as it is stored, so h is computed from the rounded values too.
    gate, up = gate.to(y.dtype.element_ty), up.to(y.dtype.element_ty)
    tl.store(y + left, gate, mask=is_inside)
    tl.store(y + left + width, up, mask=is_inside)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(h + rows[:, None] * width + columns[None, :], activated.to(h.dtype.element_ty), mask=is_inside)


def add_and_activate(plain_T2F: Tensor, u_TR: Tensor, b_2FR: Tensor) -> tuple[Tensor, Tensor]:
    """y = plain + u B^T, and silu(gate) up. All inputs are contiguous."""
    (num_rows, num_ranks), width = u_TR.shape, plain_T2F.shape[1] // 2
    y_T2F, h_TF = torch.empty_like(plain_T2F), plain_T2F.new_empty((num_rows, width))
    _add_and_activate[(triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLUMNS))](
        plain_T2F,
        y_T2F,
        u_TR,
        b_2FR,
        h_TF,
        num_rows,
        width,
        num_ranks,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        RANKS=max(MIN_RANKS, triton.next_power_of_2(num_ranks)),
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return y_T2F, h_TF
