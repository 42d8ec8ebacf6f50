"""The sum of a token's rows as one Triton kernel: each row is read once, each token written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _sum_rows(  # noqa: PLR0913  (a kernel takes its pointers and sizes one by one)
    rows,
    other_rows,
    places,
    out,
    num_rows,
    width,
    num_choices,
    HAS_OTHER: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(num_choices):
        place = tl.load(places + token * num_choices + choice)
        is_read = columns < tl.where(place < num_rows, width, 0)  # a dropped choice has no row
        total += tl.load(rows + place * width + columns, mask=is_read, other=0.0).to(tl.float32)
        if HAS_OTHER:
            total += tl.load(other_rows + place * width + columns, mask=is_read, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_inside)


def sum_rows_kernel(y_ND: Tensor, other_ND: Tensor | None, place_TC: Tensor) -> Tensor:
    """y_TD in the dtype of `y_ND`, summed in fp32. All inputs are contiguous."""
    (num_rows, width), (num_tokens, num_choices) = y_ND.shape, place_TC.shape
    y_TD = torch.empty((num_tokens, width), dtype=y_ND.dtype, device=y_ND.device)
    if not num_tokens:
        return y_TD
    block = min(LARGEST_BLOCK, triton.next_power_of_2(width))
    _sum_rows[(num_tokens, triton.cdiv(width, block))](
        y_ND,
        y_ND if other_ND is None else other_ND,
        place_TC,
        y_TD,
        num_rows,
        width,
        num_choices,
        HAS_OTHER=other_ND is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return y_TD
