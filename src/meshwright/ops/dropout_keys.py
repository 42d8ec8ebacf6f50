"""Keys of dropout: 64 random bits for each token, from which masks are computed.

A key is a hash of everything that tells one token of a run from another, one number at a time:

    sequence   seed, step, index of the sequence in the global batch
    token      its sequence, position in the full sequence
    row        its token, layer, for routed experts the expert, matrix

None of these depends on the mesh, so neither does a mask. The hash is the finaliser of splitmix64.
"""

import hashlib

import torch
from torch import Tensor

_WORD = 1 << 64
_STEP = 0x9E3779B97F4A7C15  # splitmix64's: 2**64 / golden ratio


def signed(value: int, bits: int = 64) -> int:
    """The signed integer of `bits` bits that has the same bits: torch has no arithmetic on unsigned ones."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def mixed(keys: Tensor, number: Tensor | int) -> Tensor:
    """The keys of whatever has this number among those that share a key; int64, products wrap around."""
    z = keys + number * signed(_STEP) if isinstance(number, Tensor) else keys + signed(number * _STEP)
    z = (z ^ _shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits as if unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sequence_keys(seed: int, step: int, sequences_B: Tensor) -> Tensor:
    """keys_B of sequences by their index in the global batch of a step."""
    start = torch.tensor(signed(seed), dtype=torch.int64, device=sequences_B.device)
    return mixed(mixed(mixed(start, 0), step), sequences_B)


def token_keys(keys_B: Tensor, length: int) -> Tensor:
    """keys_BS of the tokens of sequences, by their position in the full sequence."""
    return mixed(keys_B[:, None], torch.arange(length, device=keys_B.device))


def number_of_name(name: str) -> int:
    """The number of a matrix among those of its block: 64 bits of a digest of its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _WORD
