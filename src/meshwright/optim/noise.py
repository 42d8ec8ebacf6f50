"""Rounding noise that does not depend on how a tensor is cut: a hash of name, step and global index."""

import hashlib

import torch
from torch import Tensor

from meshwright.optim.whole import Whole

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # two odd constants that spread every bit over 32


def uniform_noise(whole: Whole, device: torch.device, *, key: str) -> Tensor:
    """A number in [0, 1) for each element of the shard; `key` tells draws of one tensor apart."""
    digest = hashlib.blake2b(f"{whole.name}/{key}".encode(), digest_size=8).digest()
    row_key, column_key = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    rows = _mixed(_fold(_row_index(whole, device)) ^ row_key)
    last = whole.box[-1]
    columns = _mixed(torch.arange(last.start, last.stop, dtype=torch.int32, device=device) ^ column_key)
    bits = _mixed(rows.unsqueeze(-1) + columns)
    return ((bits >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


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
