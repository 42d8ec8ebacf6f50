"""From numbers to fp8 and back.

    x  ~  values x unit        values in fp8, unit a power of two per block

The unit is the smallest power of two with which the largest number of its block still fits the format. A
power of two makes the scaling itself exact, so that only the rounding to fp8 loses anything and any two
machines, compiled or not, round to the same bits; E4M3 and E5M2 are floating, so a scale between two powers
would not round finer, it would only keep numbers 2^16 times smaller than the largest a bit longer.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.precision.fp8.recipes import Block

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_BIAS = 127
# The largest finite E4M3 is 1.75 x 2^8 and the largest E5M2 is 1.75 x 2^15: the same mantissa.
_LARGEST_MANTISSA = 3 << (_MANTISSA_BITS - 2)
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


class Quantised(NamedTuple):
    """x[M, K] as fp8 values and the worth of one of them."""

    values_MK: Tensor
    unit: Tensor
    """fp32; a scalar for the whole tensor, or [M, K / columns of a block]."""


def quantise(
    x_MK: Tensor, dtype: torch.dtype, block: Block, groups: tuple[ProcessGroup, ...] = ()
) -> Quantised:
    """x in fp8 with the scales it needs itself; `groups` are those over which x is cut."""
    return encode(x_MK, unit_of(agreed(block_amax(x_MK, block), groups), dtype), dtype, block)


def block_amax(x_MK: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, fp32; nan where a block holds one."""
    if block is None:
        return x_MK.abs().amax().float()
    rows, columns = block
    return x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)).float()


def agreed(amax: Tensor, groups: tuple[ProcessGroup, ...]) -> Tensor:
    """The largest magnitude of a tensor from those of the parts that ranks hold. Communicates."""
    for group in groups:
        amax = amax.clone()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def unit_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two u with amax / u in the range of `dtype`; nan where amax is not finite.

    Exact on any device: it is read off the bits of amax, no logarithm is taken.
    """
    bits = amax.view(torch.int32)
    is_above = (bits & _MANTISSA_MASK) > _LARGEST_MANTISSA
    exponent = (bits >> _MANTISSA_BITS) - _BIAS - _LARGEST_EXPONENT[dtype] + is_above.int()
    # Both u and 1 / u stay normal numbers; an all-zero block gets the smallest unit.
    unit = ((exponent.clamp(-126, 126) + _BIAS) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), unit, torch.nan)


def encode(x_MK: Tensor, unit: Tensor, dtype: torch.dtype, block: Block) -> Quantised:
    """x in fp8 with given units, one per block. What does not fit saturates; nan stays nan."""
    if block is None:
        return Quantised(_cast(x_MK * unit.reciprocal().to(_wide(x_MK)), dtype), unit)
    rows, columns = block
    unit = unit.repeat_interleave(rows, 0) if rows > 1 else unit
    scaled = x_MK.unflatten(1, (-1, columns)) * unit.reciprocal().to(_wide(x_MK)).unsqueeze(2)
    return Quantised(_cast(scaled, dtype).flatten(1), unit)


def decode(x: Quantised, dtype: torch.dtype) -> Tensor:
    """The numbers that the fp8 values stand for; exact in bf16 and wider."""
    values_MK = x.values_MK.to(dtype)
    if x.unit.ndim == 0:
        return values_MK * x.unit.to(dtype)
    return (values_MK.unflatten(1, (x.unit.shape[1], -1)) * x.unit.to(dtype).unsqueeze(2)).flatten(1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max  # torch turns what is larger into nan or inf
    return x.clamp(-largest, largest).to(dtype)
