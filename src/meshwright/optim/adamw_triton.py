"""AdamW over a shard as one Triton kernel; weight and moments are stored in fp32 or bf16.

The arithmetic is that of `adamw`, `rounding_noise` and `rounding`, line by line. A program updates a part of
one row, so that the row and column hashes of the noise need no division per element: the compiler's kernel
for dynamic shapes divides, and ran at 2.6 TB/s on an H200, whose memory has 4.3.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshwright.optim.fused import AdamScalars
from meshwright.optim.rounding_noise import NoiseGrid

BLOCK_COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _hash32(bits):
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _to_fp32(stored):
    """The fp32 value of bf16 bits; fp32 values as they are."""
    if stored.dtype == tl.int16:
        stored = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return stored


@triton.jit
def _rounded(fp32, noise):
    bits = fp32.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    with_noise = bits + noise
    stays_finite = ((with_noise & 0x7FFFFFFF) < 0x7F800000) & (magnitude < 0x7F800000)
    upper = tl.where(stays_finite, with_noise, bits) >> 16
    return tl.where(magnitude > 0x7F800000, 0x7FC0, upper).to(tl.int16)


@triton.jit
def _store(out, offsets, fp32, noise, is_inside):
    if out.dtype.element_ty == tl.int16:
        tl.store(out + offsets, _rounded(fp32, noise), mask=is_inside)
    else:
        tl.store(out + offsets, fp32, mask=is_inside)


@triton.jit
def _adamw(  # noqa: PLR0913  (a kernel takes its pointers and scalars one by one)
    stored,
    lower,
    gradient,
    first,
    second,
    rows,
    columns,
    key,
    gradient_scale,
    decay_factor,
    step_size,
    bias_correction2_sqrt,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    num_columns,
    num_blocks,
    HAS_LOWER: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    HAS_SCALE: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    HAS_NOISE: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
    BLOCK: tl.constexpr,  # pyright: ignore[reportGeneralTypeIssues]
):
    row = tl.program_id(0) // num_blocks
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < num_columns
    offsets = row.to(tl.int64) * num_columns + column
    low = 0
    high = 0
    if HAS_NOISE:
        noise = _hash32(
            tl.load(rows + row) + tl.load(columns + column, mask=is_inside, other=0) + tl.load(key)
        )
        low = noise & 0xFFFF
        high = (noise >> 16) & 0xFFFF

    g = tl.load(gradient + offsets, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        g *= tl.load(gradient_scale).to(tl.float32)
    weight = tl.load(stored + offsets, mask=is_inside, other=0)
    if HAS_LOWER:
        lower_bits = tl.load(lower + offsets, mask=is_inside, other=0).to(tl.int32)
        weight = ((weight.to(tl.int32) << 16) + lower_bits).to(tl.float32, bitcast=True)
    else:
        weight = _to_fp32(weight)
    m = _to_fp32(tl.load(first + offsets, mask=is_inside, other=0))
    v = _to_fp32(tl.load(second + offsets, mask=is_inside, other=0))

    m += one_minus_beta1 * (g - m)
    v = v * beta2 + one_minus_beta2 * g * g
    weight = weight * decay_factor - step_size * (m / (tl.sqrt(v) / bias_correction2_sqrt + eps))

    _store(first, offsets, m, high, is_inside)
    _store(second, offsets, v, low ^ high, is_inside)
    if HAS_LOWER:
        bits = weight.to(tl.int32, bitcast=True)
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
        upper = tl.where(is_number, (bits + 0x8000) >> 16, 0x7FC0)
        tl.store(stored + offsets, upper.to(tl.int16), mask=is_inside)
        tl.store(lower + offsets, tl.where(is_number, bits, 0).to(tl.int16), mask=is_inside)
    else:
        _store(stored, offsets, weight, low, is_inside)


def adamw_kernel(
    stored: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: AdamScalars,
    grid: NoiseGrid | None,
    key: Tensor,
) -> None:
    """As `adamw_pass`; all tensors are contiguous [rows, columns], in fp32 or as int16 bits."""
    assert all(one.is_contiguous() for one in (stored, gradient, first, second))
    num_rows, num_columns = stored.shape
    if grid is None and stored.numel() % BLOCK_COLUMNS == 0:  # rows matter to the noise alone
        num_rows, num_columns = stored.numel() // BLOCK_COLUMNS, BLOCK_COLUMNS
    num_blocks = triton.cdiv(num_columns, BLOCK_COLUMNS)
    has_scale = isinstance(scalars.gradient_scale, Tensor)
    _adamw[(num_rows * num_blocks,)](
        stored,
        stored if lower is None else lower,
        gradient,
        first,
        second,
        key if grid is None else grid.rows_R,
        key if grid is None else grid.columns_C,
        key,
        scalars.gradient_scale if has_scale else key,
        decay_factor=scalars.decay_factor,
        step_size=scalars.step_size,
        bias_correction2_sqrt=scalars.bias_correction2_sqrt,
        one_minus_beta1=scalars.one_minus_beta1,
        beta2=scalars.beta2,
        one_minus_beta2=scalars.one_minus_beta2,
        eps=scalars.eps,
        num_columns=num_columns,
        num_blocks=num_blocks,
        HAS_LOWER=lower is not None,
        HAS_SCALE=has_scale,
        HAS_NOISE=grid is not None,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]  (an option of the launch)
    )
