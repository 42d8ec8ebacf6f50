"""NF4 to 16 or 32 bits as one Triton kernel: half a byte is read and one number written per weight."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 1024
NUM_WARPS = 4


@triton.jit
def _value(code):  # pyright: ignore[reportGeneralTypeIssues]
    """The value of a code, by comparisons: a table in memory would be read once per weight."""
    x = tl.where(code == 0, -1.0, 0.0)
    x = tl.where(code == 1, -0.6961928009986877, x)
    x = tl.where(code == 2, -0.5250730514526367, x)
    x = tl.where(code == 3, -0.39491748809814453, x)
    x = tl.where(code == 4, -0.28444138169288635, x)
    x = tl.where(code == 5, -0.18477343022823334, x)
    x = tl.where(code == 6, -0.09105003625154495, x)
    x = tl.where(code == 8, 0.07958029955625534, x)
    x = tl.where(code == 9, 0.16093020141124725, x)
    x = tl.where(code == 10, 0.24611230194568634, x)
    x = tl.where(code == 11, 0.33791524171829224, x)
    x = tl.where(code == 12, 0.44070982933044434, x)
    x = tl.where(code == 13, 0.5626170039176941, x)
    x = tl.where(code == 14, 0.7229568362236023, x)
    return tl.where(code == 15, 1.0, x).to(tl.float32)


@triton.jit
def _dequantise(packed, absmax, out, num_bytes, BLOCK: tl.constexpr):  # pyright: ignore[reportGeneralTypeIssues]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < num_bytes
    codes = tl.load(packed + places, mask=is_inside, other=0).to(tl.int32)
    scale = tl.load(absmax + places // 32, mask=is_inside, other=0.0)  # 64 weights are 32 bytes
    high = (_value(codes >> 4) * scale).to(out.dtype.element_ty)
    low = (_value(codes & 15) * scale).to(out.dtype.element_ty)
    both = tl.interleave(high, low)
    elements = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out + elements, both, mask=elements < 2 * num_bytes)


def dequantise_into(packed: Tensor, absmax: Tensor, out: Tensor) -> None:
    """Write the weights to `out`; all three are contiguous, absmax is fp32."""
    num_bytes = packed.numel()
    assert packed.is_contiguous() and absmax.is_contiguous() and out.is_contiguous()
    _dequantise[(triton.cdiv(num_bytes, BLOCK_BYTES),)](
        packed,
        absmax,
        out,
        num_bytes,
        BLOCK=BLOCK_BYTES,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
