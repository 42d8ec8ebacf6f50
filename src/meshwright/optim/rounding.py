"""fp32 numbers kept in 16 bits: exactly with the other 16 beside them, or rounded at random.

    exact       bits = (upper << 16) + lower, lower in [-32768, 32767]: `upper` is the nearest bf16 number,
                ties away from zero (ties to even would need 65537 values of `lower`)
    stochastic  upper = (bits + noise) >> 16: up with the chance lower / 65536, so right on average; a number
                that bf16 has stays as it is, and a finite one stays finite

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


def read(kept: Tensor, lower: Tensor | None = None) -> Tensor:
    """The numbers behind int16 bits, with or without their lower half; wide tensors as they are."""
    if kept.dtype != torch.int16:
        return kept
    bits = kept.to(torch.int32) << 16
    return (bits if lower is None else bits + lower.to(torch.int32)).view(torch.float32)


def write(wide: Tensor, kept: Tensor, lower: Tensor | None, noise: Tensor | None) -> None:
    """Keep fp32 numbers in place: exactly where there is a `lower`, else rounded by `noise`."""
    if kept.dtype != torch.int16:
        kept.copy_(wide)
    elif lower is not None:
        upper_bits, lower_bits = split(wide)
        kept.copy_(upper_bits)
        lower.copy_(lower_bits)
    else:
        assert noise is not None
        kept.copy_(rounded(wide, noise))


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """(upper, lower) halves of fp32 numbers, int16; `read` gives the numbers back bit by bit."""
    bits = wide.view(torch.int32)
    is_number = ~wide.isnan()  # a NaN's payload could carry over into the sign: kept as the plain NaN
    upper = torch.where(is_number, (bits + 0x8000) >> 16, _NOT_A_NUMBER)
    return upper.to(torch.int16), torch.where(is_number, bits, 0).to(torch.int16)


def rounded(wide: Tensor, noise: Tensor) -> Tensor:
    """bf16 bits of fp32 numbers, rounded up in magnitude where noise in [0, 65536) reaches over."""
    bits = wide.view(torch.int32)
    raised = bits + noise
    stays_finite = (raised & _MAGNITUDE) < _INFINITE
    upper = torch.where(stays_finite & wide.isfinite(), raised, bits) >> 16
    return torch.where(wide.isnan(), _NOT_A_NUMBER, upper).to(torch.int16)
