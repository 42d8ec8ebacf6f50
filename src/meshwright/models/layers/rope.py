"""Rotary positions: pairs of channels turn by position x frequency.

Tables are computed from the positions of each token in every forward pass, once for all layers, so
packed documents and reordered sequences need nothing special, and no table is ever cast or saved.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.spec import RopeScalingSpec, RopeSpec


class Rotation(NamedTuple):
    """Cosine and sine per token and pair of channels (K is half of the rotary width here)."""

    cos_BSK: Tensor
    sin_BSK: Tensor
    interleaved: bool


def rotation(rope: RopeSpec, positions_BS: Tensor, *, width: int, dtype: torch.dtype) -> Rotation:
    """The tables for these positions, in `dtype` (float32, or float64 when the model is)."""
    frequencies_K = rope_frequencies(rope, width, device=positions_BS.device).to(dtype)
    angles_BSK = positions_BS.to(dtype)[..., None] * frequencies_K
    temperature = rope_temperature(rope)
    return Rotation(angles_BSK.cos() * temperature, angles_BSK.sin() * temperature, rope.interleaved)


def rotate(x_BSHK: Tensor, turn: Rotation) -> Tensor:
    """Each pair of channels turned; computed in the dtype of the tables and cast back."""
    cos, sin = turn.cos_BSK[:, :, None], turn.sin_BSK[:, :, None]
    wide = x_BSHK.to(cos.dtype)
    if turn.interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSHK.dtype)


def rope_frequencies(rope: RopeSpec, width: int, *, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair, after scaling; float64."""
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
    """Slow pairs are stretched by the factor, fast ones stay, those between are blended."""
    turns_K = scaling.original_positions * frequencies_K / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_K = ((turns_K - low) / (high - low)).clamp(0, 1)
    return frequencies_K * (kept_K + (1 - kept_K) / scaling.factor)


def _yarn(frequencies_K: Tensor, scaling: RopeScalingSpec, *, theta: float) -> Tensor:
    """As llama3, but blended by the index of the pair between two numbers of full turns."""
    num_pairs = len(frequencies_K)

    def pair_with(turns: float) -> float:
        return num_pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), 2 * num_pairs - 1)
    index_K = torch.arange(num_pairs, dtype=torch.float64, device=frequencies_K.device)
    stretched_K = ((index_K - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies_K * (1 - stretched_K + stretched_K / scaling.factor)


def rope_temperature(rope: RopeSpec) -> float:
    """What yarn multiplies rotated queries and keys with."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dims:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dims)
    return _mscale(scaling.factor, 1.0)


def softmax_temperature(rope: RopeSpec | None) -> float:
    """What latent attention with yarn multiplies its softmax scale with."""
    scaling = None if rope is None else rope.scaling
    if scaling is None or not scaling.mscale_all_dims:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dims) ** 2


def _mscale(factor: float, coefficient: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
