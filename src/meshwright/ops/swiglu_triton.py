"""The backward pass of SwiGLU as one Triton kernel: three reads and two writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _swiglu_backward(dh, gate_up, out, width, BLOCK: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    row = tl.program_id(0).to(tl.int64)
    _gradients_of_block(dh, gate_up, out, width, row, tl.program_id(1) * BLOCK, BLOCK)


@triton.jit
def _swiglu_backward_with_amax(  # pyright: ignore[reportGeneralTypeIssues]
    dh, gate_up, out, amax, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    has_nan = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, width, BLOCK):
        dgate, dup = _gradients_of_block(dh, gate_up, out, width, row, start, BLOCK)
        largest = tl.maximum(largest, tl.maximum(tl.abs(dgate), tl.abs(dup)))
        has_nan = has_nan | ((dgate != dgate) | (dup != dup)).to(tl.int32)
    largest = tl.where(has_nan > 0, float("inf"), largest)
    tl.store(amax + row, tl.max(largest, axis=0))


@triton.jit
def _gradients_of_block(dh, gate_up, out, width, row, start, BLOCK: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    """Store dgate and dup of one block, and return them as stored, in fp32; zeros beyond the width."""
    columns = start + tl.arange(0, BLOCK)
    is_inside = columns < width
    left = row * 2 * width + columns
    g = tl.load(dh + row * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + left, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + left + width, mask=is_inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dh_sigmoid = g * sigmoid
    dgate = (dh_sigmoid * up * (1.0 + gate * (1.0 - sigmoid))).to(out.dtype.element_ty)
    dup = (dh_sigmoid * gate).to(out.dtype.element_ty)
    tl.store(out + left, dgate, is_inside)
    tl.store(out + left + width, dup, is_inside)
    return dgate.to(tl.float32), dup.to(tl.float32)


def swiglu_backward(dh_TF: Tensor, gate_up_T2F: Tensor, amax_T: Tensor | None = None) -> Tensor:
    """dgate and dup, concatenated; the amax of each row goes to `amax_T`. All inputs are contiguous."""
    num_rows, width = dh_TF.shape
    out_T2F = torch.empty_like(gate_up_T2F)
    options = {"BLOCK": BLOCK_COLUMNS, "num_warps": NUM_WARPS}
    if amax_T is None:
        grid = (num_rows, triton.cdiv(width, BLOCK_COLUMNS))
        _swiglu_backward[grid](dh_TF, gate_up_T2F, out_T2F, width, **options)  # pyright: ignore[reportArgumentType]
    else:
        _swiglu_backward_with_amax[(num_rows,)](dh_TF, gate_up_T2F, out_T2F, amax_T, width, **options)  # pyright: ignore[reportArgumentType]
    return out_T2F
