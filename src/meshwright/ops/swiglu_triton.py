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
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    left = row * 2 * width + columns
    g = tl.load(dh + row * width + columns, mask=is_inside).to(tl.float32)
    gate = tl.load(gate_up + left, mask=is_inside).to(tl.float32)
    up = tl.load(gate_up + left + width, mask=is_inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dh_sigmoid = g * sigmoid
    tl.store(
        out + left, (dh_sigmoid * up * (1.0 + gate * (1.0 - sigmoid))).to(out.dtype.element_ty), is_inside
    )
    tl.store(out + left + width, (dh_sigmoid * gate).to(out.dtype.element_ty), is_inside)


def swiglu_backward(dh_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    """dgate and dup, concatenated. Both inputs are contiguous."""
    num_rows, width = dh_TF.shape
    out_T2F = torch.empty_like(gate_up_T2F)
    _swiglu_backward[(num_rows, triton.cdiv(width, BLOCK_COLUMNS))](
        dh_TF,
        gate_up_T2F,
        out_T2F,
        width,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
    return out_T2F
