"""The order of samples: a pure function of seed, epoch and index, in constant memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Even, so that the two halves of the last round have the widths of the first. Four rounds already give
# a pseudo-random permutation for a perfect round function; eight also work for a few bits of width.
_NUM_ROUNDS = 8
# Above the numbers of sources, so that a window of a source and another source have different permutations.
_WINDOW_KEY = 1 << 32


@dataclass(frozen=True)
class Blocks:
    """A shuffle by blocks, for storage that reads neighbours together (an object store, a disk)."""

    block_samples: int
    """Samples that are stored, and read, one after the other."""
    window_blocks: int
    """Blocks that are shuffled together; a reader keeps this many blocks."""


@dataclass(frozen=True)
class SampleOrder:
    """The sample at each global index of one source; the global index continues over epochs."""

    num_samples: int
    """Samples of one epoch."""
    seed: int
    shuffle: bool = True
    blocks: Blocks | None = None
    """None: an epoch is a permutation of all samples."""
    source: int = 0
    """Number of the source, so that the sources of a blend have permutations of their own."""

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The `count` samples from global index `position` on."""
        return self.at(np.arange(position, position + count, dtype=np.int64))

    def at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each global index; every epoch has a permutation of its own."""
        epoch, within = np.divmod(index, self.num_samples)
        if not self.shuffle:
            return within
        ids = np.empty_like(within)
        for one in np.unique(epoch):
            here = epoch == one
            ids[here] = self._permute(within[here], int(one))
        return ids

    def _permute(self, within: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        keys = [epoch, self.source] if self.source else [epoch]
        if self.blocks is None:
            return permute(within, num_items=self.num_samples, seed=self.seed, epoch=keys)
        return permute_blocks(within, self.blocks, num_items=self.num_samples, seed=self.seed, epoch=keys)


class OrderCache:
    """An order with its next ids computed in pieces: a call for few ids costs little.

    The first piece is small, so that the first batch comes soon; each further one is twice as large.
    """

    def __init__(self, order: "Order", first_piece: int = 1 << 10, largest_piece: int = 1 << 16) -> None:
        self._order, self._start = order, 0
        self._first_piece, self._largest_piece, self._piece = first_piece, largest_piece, first_piece
        self._ids = np.empty(0, dtype=np.int64)

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The `count` samples from global index `position` on."""
        first = position - self._start
        if first < 0 or first + count > len(self._ids):
            goes_on = 0 < first <= len(self._ids)
            self._piece = min(2 * self._piece, self._largest_piece) if goes_on else self._first_piece
            self._start, first = position, 0
            self._ids = self._order.sample_ids(position, max(count, self._piece))
        return self._ids[first : first + count]


class Order(Protocol):
    """The sample at each global index."""

    def sample_ids(self, position: int, count: int) -> NDArray[np.int64]:
        """The `count` samples from global index `position` on."""
        ...


def sample_rng(seed: int, epoch: int, sample: int, *, source: int = 0) -> np.random.Generator:
    """The random generator of one sample in one epoch (augmentation), on any rank and in any worker."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, sample, source])))


def permute_blocks(
    index: NDArray[np.int64], blocks: Blocks, *, num_items: int, seed: int, epoch: Sequence[int]
) -> NDArray[np.int64]:
    """The image of each index when blocks are permuted, and then the samples of each window of blocks.

    A last block that is not full stays in the last window.
    """
    size = blocks.block_samples
    window, num_blocks = size * blocks.window_blocks, num_items // size
    which, within = np.divmod(index, window)
    windows, number = np.unique(which, return_inverse=True)
    keys = np.stack([_round_keys([seed, *epoch, _WINDOW_KEY + one]) for one in windows.tolist()], axis=1)
    sizes = np.minimum(window, num_items - windows * window)[number]
    for size_here in np.unique(sizes).tolist():  # only the last window may be smaller
        here = sizes == size_here
        within[here] = _permuted(within[here], size_here, keys[:, number[here]])
    slot, offset = np.divmod(which * window + within, size)
    is_full = slot < num_blocks
    if is_full.any():
        slot[is_full] = permute(slot[is_full], num_items=num_blocks, seed=seed, epoch=epoch)
    return slot * size + offset


def permute(
    index: NDArray[np.int64], *, num_items: int, seed: int, epoch: int | Sequence[int]
) -> NDArray[np.int64]:
    """The image of each index under a pseudo-random permutation of range(num_items), in constant memory.

    A Feistel network is a bijection on the next power of two. A value outside the range goes through again
    until it is inside: that follows its cycle, so the result is a bijection on the range. Less than half of
    the values are outside, so two passes are the expected worst.
    """
    keys = _round_keys([seed, epoch] if isinstance(epoch, int) else [seed, *epoch])
    return _permuted(index, num_items, keys)


def _round_keys(entropy: Sequence[int]) -> NDArray[np.uint64]:
    """The key of each round."""
    return np.random.SeedSequence(entropy).generate_state(_NUM_ROUNDS, np.uint64).astype(np.uint64)


def _permuted(index: NDArray[np.int64], num_items: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The image of each index; `keys` are those of all of them, or have a column for each."""
    width = max(2, (num_items - 1).bit_length())
    values = _feistel(index.astype(np.uint64), width=width, keys=keys)
    while (outside := values >= num_items).any():
        chosen = keys if keys.ndim == 1 else keys[:, outside]
        values[outside] = _feistel(values[outside], width=width, keys=chosen)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], *, width: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low, high = np.uint64(width // 2), np.uint64(width - width // 2)
    for key in keys:
        left, right = values >> low, values & _ones(low)
        values = (right << high) | (left ^ (scramble(right ^ key) & _ones(high)))
        low, high = high, low
    return values


def _ones(width: np.uint64) -> np.uint64:
    return np.uint64((1 << int(width)) - 1)


def scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit mixing function (the finaliser of splitmix64): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
