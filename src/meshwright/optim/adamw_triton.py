"""AdamW's pass over a shard whose weight or moments are kept in bf16, as one Triton kernel.

The arithmetic is that of `adamw`, `noise` and `rounding`, line by line. A program takes a part of one row, so
that row and columns of the noise are known without a division per element: the compiler's kernel for any
shape divides, and ran at 2.6 TB/s on an H200, whose memory has 4.3.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshwright.optim.fused import Numbers
from meshwright.optim.rounding_noise import NoiseGrid

BLOCK_COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _mixed(bits):
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _opened(kept):
    """A bf16 number, as its bits, or an fp32 one."""
    if kept.dtype == tl.int16:
        kept = (kept.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return kept


@triton.jit
def _rounded(wide, noise):
    bits = wide.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    raised = bits + noise
    stays_finite = ((raised & 0x7FFFFFFF) < 0x7F800000) & (magnitude < 0x7F800000)
    upper = tl.where(stays_finite, raised, bits) >> 16
    return tl.where(magnitude > 0x7F800000, 0x7FC0, upper).to(tl.int16)


@triton.jit
def _store(out, places, wide, noise, is_inside):
    if out.dtype.element_ty == tl.int16:
        tl.store(out + places, _rounded(wide, noise), mask=is_inside)
    else:
        tl.store(out + places, wide, mask=is_inside)


@triton.jit
def _adamw(  # noqa: PLR0913  (a kernel takes its pointers and numbers one by one)
    kept,
    lower,
    gradient,
    first,
    second,
    rows,
    columns,
    key,
    factor,
    keep,
    rate,
    root,
    forget1,
    beta2,
    forget2,
    eps,
    num_columns,
    num_blocks,
    HAS_LOWER: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    HAS_FACTOR: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < num_columns
    places = row.to(tl.int64) * num_columns + column
    bits = _mixed(tl.load(rows + row) + tl.load(columns + column, mask=is_inside, other=0) + tl.load(key))
    low = bits & 0xFFFF
    high = (bits >> 16) & 0xFFFF

    g = tl.load(gradient + places, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g *= tl.load(factor).to(tl.float32)
    weight = tl.load(kept + places, mask=is_inside, other=0)
    if HAS_LOWER:
        rest = tl.load(lower + places, mask=is_inside, other=0).to(tl.int32)
        weight = ((weight.to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
    else:
        weight = _opened(weight)
    m = _opened(tl.load(first + places, mask=is_inside, other=0))
    v = _opened(tl.load(second + places, mask=is_inside, other=0))

    m += forget1 * (g - m)
    v = v * beta2 + forget2 * g * g
    weight = weight * keep - rate * (m / (tl.sqrt(v) / root + eps))

    _store(first, places, m, high, is_inside)
    _store(second, places, v, low ^ high, is_inside)
    if HAS_LOWER:
        bits = weight.to(tl.int32, bitcast=True)
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
        upper = tl.where(is_number, (bits + 0x8000) >> 16, 0x7FC0)
        tl.store(kept + places, upper.to(tl.int16), mask=is_inside)
        tl.store(lower + places, tl.where(is_number, bits, 0).to(tl.int16), mask=is_inside)
    else:
        _store(kept, places, weight, low, is_inside)


def adamw_kernel(
    kept: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Numbers,
    grid: NoiseGrid,
    key: Tensor,
) -> None:
    """As `adamw_pass`; all are contiguous [rows, columns], in fp32 or as int16 bits. Numbers are floats."""
    assert all(one.is_contiguous() for one in (kept, gradient, first, second))
    num_rows, num_columns = kept.shape
    num_blocks = triton.cdiv(num_columns, BLOCK_COLUMNS)
    has_factor = isinstance(numbers.factor, Tensor)
    _adamw[(num_rows * num_blocks,)](
        kept,
        kept if lower is None else lower,
        gradient,
        first,
        second,
        grid.rows_R,
        grid.columns_C,
        key,
        numbers.factor if has_factor else key,
        keep=numbers.keep,
        rate=numbers.rate,
        root=numbers.root,
        forget1=numbers.forget1,
        beta2=numbers.beta2,
        forget2=numbers.forget2,
        eps=numbers.eps,
        num_columns=num_columns,
        num_blocks=num_blocks,
        HAS_LOWER=lower is not None,
        HAS_FACTOR=has_factor,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (of the launch, not of the kernel)
    )
