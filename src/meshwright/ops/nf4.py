"""NF4: weights of 4 bits, quantiles of a normal distribution, with one fp32 absmax per 64 weights (QLoRA).

    absmax[n, k / 64] = the largest magnitude of 64 weights in a row
    code[n, k]        = the nearest of 16 values in [-1, 1] to W / absmax; a tie takes the lower one
    packed[n, k / 2]  = two codes in a byte, the first one in its high half
    W'[n, k]          = value[code] absmax, in fp32, then cast

The bytes are those of bitsandbytes. 64 divides the inputs of a matrix, so a block never crosses a row, and
any shard of rows, or of columns in multiples of 64, is quantised and dequantised by itself.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 64
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.nf4_triton import dequantise_into


@torch.no_grad()
def quantise_nf4(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """packed[n, k / 2] of uint8 and the bits of absmax[n, k / 64] as int32; k is a multiple of 64.

    Bits in place of fp32 numbers: mixed precision casts floating-point parameters, and these must stay exact.
    """
    blocks = weight_NK.float().unflatten(-1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    values = torch.tensor(VALUES, device=weight_NK.device)
    thresholds = (values[1:] + values[:-1]) / 2
    normalised = blocks / torch.where(absmax == 0, 1.0, absmax)[..., None]
    codes = torch.bucketize(normalised.flatten(-2), thresholds, out_int32=True).to(torch.uint8)
    return codes[..., 0::2] << 4 | codes[..., 1::2], absmax.view(torch.int32)


def dequantise_nf4(packed: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights W'[n, k] in `dtype`."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    return _dequantise(packed, absmax, torch.empty(shape, dtype=dtype, device=packed.device))


def concatenated_nf4(packed: Sequence[Tensor], absmax: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of several matrices in one buffer, which lives as long as the matmul that reads it."""
    num_rows, width = sum(len(one) for one in packed), 2 * packed[0].shape[-1]
    weight_NK = torch.empty((num_rows, width), dtype=dtype, device=packed[0].device)
    for part, one, scale in zip(weight_NK.split([len(one) for one in packed]), packed, absmax, strict=True):
        _dequantise(one, scale, part)
    return weight_NK


def _dequantise(packed: Tensor, absmax: Tensor, out: Tensor) -> Tensor:
    if packed.is_cuda and out.dtype != torch.float64:
        dequantise_into(packed, absmax.view(torch.float32), out)
        return out
    values = torch.tensor(VALUES, device=packed.device)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
    blocks = values[codes.int()].unflatten(-1, (-1, BLOCK)) * absmax.view(torch.float32)[..., None]
    return out.copy_(blocks.flatten(-2))
