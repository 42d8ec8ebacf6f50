"""Quantisation to fp8 and back.

    x  ~  values x scale        values in fp8; scale, a power of two per block, is what `torch._scaled_mm`
    takes

The scale is the smallest power of two with which the amax of its block fits the format. Scaling by a power of
two is exact, so only the cast to fp8 rounds, and any two machines, compiled or not, round to the same bits.
E4M3 and E5M2 are floating-point formats: a scale between two powers of two would not round finer, it would
only keep values 2^16 times smaller than the amax a bit longer.
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


Groups = tuple[ProcessGroup, ...]


class Quantised(NamedTuple):
    """x[M, K] as fp8 values and their scale."""

    values_MK: Tensor
    scale: Tensor
    """fp32: a scalar for the full tensor, or [M, K / columns of a block]."""


def quantise(x_MK: Tensor, dtype: torch.dtype, block: Block, groups: Groups = ()) -> Quantised:
    """x in fp8 with scales from its own amax, all-reduced over the groups that shard x."""
    return encode(
        x_MK, power_of_two_scale(all_reduce_amax(block_amax(x_MK, block), groups), dtype), dtype, block
    )


def block_amax(x_MK: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, fp32; nan where a block holds one."""
    if block is None:
        return x_MK.abs().amax().float()
    rows, columns = block
    return x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)).float()


def all_reduce_amax(amax: Tensor, groups: Groups) -> Tensor:
    """The amax of a full tensor: an all-reduce MAX of the shards' amax over each group."""
    for group in groups:
        amax = amax.clone()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two u with amax / u in the range of `dtype`; nan where amax is not finite.

    Exact on any device: it is computed from the bits of amax, without a logarithm.
    """
    bits = amax.view(torch.int32)
    is_above = (bits & _MANTISSA_MASK) > _LARGEST_MANTISSA
    exponent = (bits >> _MANTISSA_BITS) - _BIAS - _LARGEST_EXPONENT[dtype] + is_above.int()
    # Both u and 1 / u stay normal numbers; an all-zero block gets the smallest scale.
    scale = ((exponent.clamp(-126, 126) + _BIAS) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def encode(x_MK: Tensor, scale: Tensor, dtype: torch.dtype, block: Block) -> Quantised:
    """x in fp8 with given scales, one per block. Values out of range saturate; nan stays nan."""
    if block is None:
        return Quantised(saturating_cast(x_MK * scale.reciprocal().to(_fp32_or_fp64(x_MK)), dtype), scale)
    rows, columns = block
    scale = scale.repeat_interleave(rows, 0) if rows > 1 else scale
    scaled = x_MK.unflatten(1, (-1, columns)) * scale.reciprocal().to(_fp32_or_fp64(x_MK)).unsqueeze(2)
    return Quantised(saturating_cast(scaled, dtype).flatten(1), scale)


def decode(x: Quantised, dtype: torch.dtype) -> Tensor:
    """The dequantised values; exact in bf16, fp32 and fp64."""
    values_MK = x.values_MK.to(dtype)
    if x.scale.ndim == 0:
        return values_MK * x.scale.to(dtype)
    return (values_MK.unflatten(1, (x.scale.shape[1], -1)) * x.scale.to(dtype).unsqueeze(2)).flatten(1)


def _fp32_or_fp64(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in fp8: what is out of range becomes the largest number of the format."""
    largest = torch.finfo(dtype).max  # torch casts larger values to nan or inf
    return x.clamp(-largest, largest).to(dtype)
