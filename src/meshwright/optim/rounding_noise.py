"""Rounding noise that does not depend on the sharding: a hash of name, step and global index."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.optim.full_parameter import FullParameter

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # two odd constants that mix every bit into all 32
_STEP_MULTIPLIER = 0x9E3779B1  # odd: consecutive steps have distant keys
NOISE_LEVELS = 1 << 16


class NoiseGrid(NamedTuple):
    """Row and column hashes of a shard seen as [rows, columns]; the same at every step."""

    rows_R: Tensor
    columns_C: Tensor


class Noise(NamedTuple):
    """Integers in [0, 65536) for each element; any two of the three are independent."""

    weight: Tensor
    first: Tensor
    second: Tensor


def noise_grid(full: FullParameter, device: torch.device) -> NoiseGrid:
    """Hashes of (name, row) and (name, column), with indices of the full parameter: int32."""
    digest = hashlib.blake2b(full.name.encode(), digest_size=8).digest()
    row_key, column_key = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    last = full.local_slices[-1]
    columns = torch.arange(last.start, last.stop, dtype=torch.int32, device=device)
    rows = _fold(_row_index(full, device)).reshape(-1)
    return NoiseGrid(_hash32(rows ^ row_key), _hash32(columns ^ column_key))


def step_key(num_updates: int, device: torch.device) -> Tensor:
    """An int32 scalar that changes the noise from step to step; filled on the device, no host sync."""
    key = num_updates * _STEP_MULTIPLIER % 2**32
    return torch.full((), key - 2**32 if key >= 2**31 else key, dtype=torch.int32, device=device)


def draw(grid: NoiseGrid, key: Tensor) -> Noise:
    """The noise of one step, [rows, columns]: one hash per element gives all three integers."""
    bits = _hash32(grid.rows_R.unsqueeze(-1) + grid.columns_C + key)
    low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    return Noise(low, high, low ^ high)


def _row_index(full: FullParameter, device: torch.device) -> Tensor:
    """Index of each row of the shard in the full tensor seen as [rows, last dim]."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, part in zip(full.shape[:-1], full.local_slices[:-1], strict=True):
        local = torch.arange(part.start, part.stop, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * size + local
    return index


def _fold(index: Tensor) -> Tensor:
    return ((index & 0x7FFFFFFF) ^ (index >> 31)).to(torch.int32)


def _hash32(bits: Tensor) -> Tensor:
    """A 32-bit hash (a bijection); shifts are unsigned."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MULTIPLIERS[0]
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MULTIPLIERS[1]
    return bits ^ ((bits >> 16) & 0xFFFF)
