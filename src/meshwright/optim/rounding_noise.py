"""Rounding noise that does not depend on how a tensor is cut: a hash of name, step and global index."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # two odd constants that spread every bit over 32
_STEP_MULTIPLIER = 0x9E3779B1  # odd: steps that follow each other lie far apart
NOISE_LEVELS = 1 << 16


class NoiseGrid(NamedTuple):
    """What the noise of a shard, seen as [rows, columns], is made of; the same at every step."""

    rows_R: Tensor
    columns_C: Tensor


class Noise(NamedTuple):
    """Whole numbers in [0, 65536) for each element; any two of the three are independent."""

    weight: Tensor
    first: Tensor
    second: Tensor


def noise_grid(whole: Whole, device: torch.device) -> NoiseGrid:
    """Hashes of (name, row) and (name, column), numbered in the whole parameter: int32."""
    digest = hashlib.blake2b(whole.name.encode(), digest_size=8).digest()
    row_key, column_key = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    last = whole.box[-1]
    columns = torch.arange(last.start, last.stop, dtype=torch.int32, device=device)
    rows = _fold(_row_index(whole, device)).reshape(-1)
    return NoiseGrid(_mixed(rows ^ row_key), _mixed(columns ^ column_key))


def step_key(num_updates: int, device: torch.device) -> Tensor:
    """An int32 scalar that moves the noise of every parameter on; filled on the device, no host sync."""
    key = num_updates * _STEP_MULTIPLIER % 2**32
    return torch.full((), key - 2**32 if key >= 2**31 else key, dtype=torch.int32, device=device)


def draw(grid: NoiseGrid, key: Tensor) -> Noise:
    """The noise of one step, [rows, columns]: one hash per element gives all three numbers."""
    bits = _mixed(grid.rows_R.unsqueeze(-1) + grid.columns_C + key)
    low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    return Noise(low, high, low ^ high)


def _row_index(whole: Whole, device: torch.device) -> Tensor:
    """Number of each row of the shard in the whole tensor seen as [rows, last dim]."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, part in zip(whole.shape[:-1], whole.box[:-1], strict=True):
        here = torch.arange(part.start, part.stop, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * size + here
    return index


def _fold(index: Tensor) -> Tensor:
    return ((index & 0x7FFFFFFF) ^ (index >> 31)).to(torch.int32)


def _mixed(bits: Tensor) -> Tensor:
    """A bijection of 32 bits after which neighbours have nothing in common; shifts are unsigned."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MULTIPLIERS[0]
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MULTIPLIERS[1]
    return bits ^ ((bits >> 16) & 0xFFFF)
