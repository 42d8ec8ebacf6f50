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
    chance = 1.0 / (1.0 + tl.exp(-gate))
    through = g * chance
    tl.store(out + left, (through * up * (1.0 + gate * (1.0 - chance))).to(out.dtype.element_ty), is_inside)
    tl.store(out + left + width, (through * gate).to(out.dtype.element_ty), is_inside)


def write_gradient(dh_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    """dgate | dup. Both inputs are contiguous."""
    num_rows, width = dh_TF.shape
    out_T2F = torch.empty_like(gate_up_T2F)
    _swiglu_backward[(num_rows, triton.cdiv(width, BLOCK_COLUMNS))](
        dh_TF,
        gate_up_T2F,
        out_T2F,
        width,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (of the launch, not of the kernel)
    )
    return out_T2F
