"""The order of samples: a pure function of seed, epoch and index, in constant memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Even, so that the two halves of the last round have the widths of the first. Four rounds already give
# a pseudo-random permutation for a perfect round function; eight also work for a few bits of width.
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """The sample at each global index; the global index continues over epochs."""

    num_samples: int
    seed: int
    shuffle: bool = True

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The `count` samples from global index `position` on; a new permutation in each epoch."""
        index = np.arange(position, position + count, dtype=np.int64)
        epoch, within = index // self.num_samples, index % self.num_samples
        if not self.shuffle:
            return within
        ids = np.empty_like(within)
        for one in np.unique(epoch):
            here = epoch == one
            ids[here] = permute(within[here], num_items=self.num_samples, seed=self.seed, epoch=int(one))
        return ids


def permute(index: NDArray[np.int64], *, num_items: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The image of each index under a pseudo-random permutation of range(num_items), in constant memory.

    A Feistel network is a bijection on the next power of two. A value outside the range goes through again
    until it is inside: that follows its cycle, so the result is a bijection on the range. Less than half of
    the values are outside, so two passes are the expected worst.
    """
    width = max(2, (num_items - 1).bit_length())
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(index.astype(np.uint64), width=width, keys=keys)
    while (outside := values >= num_items).any():
        values[outside] = _feistel(values[outside], width=width, keys=keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], *, width: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low, high = np.uint64(width // 2), np.uint64(width - width // 2)
    for key in keys:
        left, right = values >> low, values & _ones(low)
        values = (right << high) | (left ^ (_scramble(right ^ key) & _ones(high)))
        low, high = high, low
    return values


def _ones(width: np.uint64) -> np.uint64:
    return np.uint64((1 << int(width)) - 1)


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit mixing function (the finaliser of splitmix64): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
