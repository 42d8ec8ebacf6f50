"""Rotary position embedding (RoPE): pairs of channels rotate by position x frequency.

The cos and sin tables are computed from the positions of each token in every forward pass, once for all
layers. So packed documents and reordered sequences need nothing special, and no table is cast or saved.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec import RopeScalingSpec, RopeSpec


class RopeTables(NamedTuple):
    """cos and sin of each token and pair of channels (K is half of the rotary width here)."""

    cos_BSK: Tensor
    sin_BSK: Tensor
    interleaved: bool


def rope_tables(rope: RopeSpec, positions_BS: Tensor, *, width: int, dtype: torch.dtype) -> RopeTables:
    """The tables for these positions, in `dtype` (float32, or float64 for a float64 model)."""
    frequencies_K = rope_frequencies(rope, width, device=positions_BS.device).to(dtype)
    angles_BSK = positions_BS.to(dtype)[..., None] * frequencies_K
    temperature = rope_temperature(rope)
    return RopeTables(angles_BSK.cos() * temperature, angles_BSK.sin() * temperature, rope.interleaved)


def apply_rope(x_BSHK: Tensor, rope: RopeTables) -> Tensor:
    """x with each pair of channels rotated; computed in the dtype of the tables and cast back."""
    cos, sin = rope.cos_BSK[:, :, None], rope.sin_BSK[:, :, None]
    x = x_BSHK.to(cos.dtype)
    if rope.interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_BSHK.dtype)


def rope_frequencies(rope: RopeSpec, width: int, *, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair of channels, after scaling; float64."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies_K = rope.theta**-exponents
    if rope.scaling is None:
        return frequencies_K
    if rope.scaling.kind == "linear":
        return frequencies_K / rope.scaling.factor
    if rope.scaling.kind == "llama3":
        return _llama3(frequencies_K, rope.scaling)
    return _yarn(frequencies_K, rope.scaling, theta=rope.theta)


def _llama3(frequencies_K: Tensor, scaling: RopeScalingSpec) -> Tensor:
    """Llama 3 scaling: low frequencies are divided by the factor, high ones stay, the rest is blended."""
    rotations_K = scaling.original_positions * frequencies_K / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled_K = ((rotations_K - low) / (high - low)).clamp(0, 1)
    return frequencies_K * (unscaled_K + (1 - unscaled_K) / scaling.factor)


def _yarn(frequencies_K: Tensor, scaling: RopeScalingSpec, *, theta: float) -> Tensor:
    """YaRN scaling: as llama3, but blended by the pair's index, between two numbers of full rotations."""
    num_pairs = len(frequencies_K)

    def pair_with(rotations: float) -> float:
        return num_pairs * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), 2 * num_pairs - 1)
    index_K = torch.arange(num_pairs, dtype=torch.float64, device=frequencies_K.device)
    scaled_K = ((index_K - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies_K * (1 - scaled_K + scaled_K / scaling.factor)


def rope_temperature(rope: RopeSpec) -> float:
    """Factor by which YaRN multiplies rotated queries and keys."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dims:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dims)
    return _mscale(scaling.factor, 1.0)


def softmax_temperature(rope: RopeSpec | None) -> float:
    """Factor by which latent attention with YaRN multiplies its softmax scale."""
    scaling = None if rope is None else rope.scaling
    if scaling is None or not scaling.mscale_all_dims:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dims) ** 2


def _mscale(factor: float, coefficient: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
