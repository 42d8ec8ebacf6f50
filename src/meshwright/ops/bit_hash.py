"""Hashes of the bits of tensors, to compare tensors of two ranks or of two runs without moving them."""

from collections.abc import Iterable

import torch
from torch import Tensor

_MULTIPLIER = 31  # odd: a change of one tensor's sum always changes the total
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits as integers, modulo 2**64, on their device; one flipped bit changes it.
    No host sync."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def hash_of(tensors: Iterable[Tensor]) -> Tensor:
    """A 64-bit hash of the bits of several tensors, in order; one flipped bit always changes it."""
    sums = [sum_of_bits(tensor) for tensor in tensors]
    total = torch.zeros_like(sums[0])
    for one in sums:
        total = combined(total, one)
    return total


def combined(total: Tensor, one: Tensor) -> Tensor:
    """The hash `total` with one more sum of bits."""
    return total * _MULTIPLIER + one
