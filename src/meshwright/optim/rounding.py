"""fp32 values stored in 16 bits: exactly, with the other 16 bits beside them, or with stochastic rounding.

    exact       bits = (upper << 16) + lower, lower in [-32768, 32767]: `upper` is the nearest bf16 value,
                ties away from zero (ties to even would need 65537 values of `lower`)
    stochastic  upper = (bits + noise) >> 16: rounded up with probability lower / 65536, so unbiased; a value
                that is exact in bf16 is unchanged, and a finite one stays finite

bf16 tensors appear here as int16 tensors of the same bits, so that the same lines compile into one kernel.
"""

from typing import Literal

import torch
from torch import Tensor

WeightFormat = Literal["fp32", "bf16_exact", "bf16_stochastic"]

_INFINITE = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NOT_A_NUMBER = 0x7FC0  # in bf16


def bits_of(tensor: Tensor) -> Tensor:
    """A bf16 tensor as int16 in the same storage; others as they are."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def read(stored: Tensor, lower: Tensor | None = None) -> Tensor:
    """The fp32 values of int16 bits, with or without their lower half; other tensors as they are."""
    if stored.dtype != torch.int16:
        return stored
    bits = stored.to(torch.int32) << 16
    return (bits if lower is None else bits + lower.to(torch.int32)).view(torch.float32)


def write(fp32: Tensor, stored: Tensor, lower: Tensor | None, noise: Tensor | None) -> None:
    """Store fp32 values in place: exactly where there is a `lower`, else rounded by `noise`."""
    if stored.dtype != torch.int16:
        stored.copy_(fp32)
    elif lower is not None:
        upper_bits, lower_bits = split(fp32)
        stored.copy_(upper_bits)
        lower.copy_(lower_bits)
    else:
        assert noise is not None
        stored.copy_(rounded(fp32, noise))


def split(fp32: Tensor) -> tuple[Tensor, Tensor]:
    """(upper, lower) halves of fp32 values, int16; `read` returns the same bits."""
    bits = fp32.view(torch.int32)
    is_number = ~fp32.isnan()  # a NaN's payload could carry into the sign: stored as the plain NaN
    upper = torch.where(is_number, (bits + 0x8000) >> 16, _NOT_A_NUMBER)
    return upper.to(torch.int16), torch.where(is_number, bits, 0).to(torch.int16)


def rounded(fp32: Tensor, noise: Tensor) -> Tensor:
    """bf16 bits of fp32 values, rounded up in magnitude where adding noise in [0, 65536) carries."""
    bits = fp32.view(torch.int32)
    with_noise = bits + noise
    stays_finite = (with_noise & _MAGNITUDE) < _INFINITE
    upper = torch.where(stays_finite & fp32.isfinite(), with_noise, bits) >> 16
    return torch.where(fp32.isnan(), _NOT_A_NUMBER, upper).to(torch.int16)
