"""Groups of samples of similar lengths, with a budget of tokens: micro-batches that waste little padding.

Samples are taken in windows. Within a window they are sorted by length and divided into groups whose padded
size, longest x count, stays within the budget. Groups are planned on lengths alone, before the run, so every
rank has the same groups; the order of groups is shuffled like that of samples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.order import permute
from meshwright.errors import DataError

WINDOW_SAMPLES = 1 << 14


@dataclass(frozen=True)
class Groups:
    """The samples of each group: group g has members[offsets[g] : offsets[g + 1]]."""

    members: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def group(self, index: int) -> NDArray[np.int64]:
        """The samples of one group."""
        return self.members[self.offsets[index] : self.offsets[index + 1]]

    def fill(self, lengths: NDArray[np.int64]) -> float:
        """The share of padded positions that are tokens."""
        longest = np.maximum.reduceat(lengths[self.members], self.offsets[:-1])
        return float(lengths.sum() / (longest * np.diff(self.offsets)).sum())


def group_by_length(
    lengths: NDArray[np.int64], *, max_tokens: int, seed: int = 0, window: int = WINDOW_SAMPLES
) -> Groups:
    """Groups of similar lengths, each with at most `max_tokens` padded tokens; the seed draws the windows."""
    if len(lengths) == 0 or int(lengths.max()) > max_tokens:
        longest = int(lengths.max(initial=0))
        raise DataError(
            f"the longest sample has {longest} tokens, the budget is {max_tokens}",
            where="max_tokens",
            hint=f"use max_tokens={longest} or more",
        )
    shuffled = permute(np.arange(len(lengths), dtype=np.int64), num_items=len(lengths), seed=seed, epoch=0)
    members: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for start in range(0, len(shuffled), window):
        here = shuffled[start : start + window]
        here = here[np.argsort(lengths[here], kind="stable")]
        members.append(here)
        counts += _group_sizes(lengths[here], max_tokens)
    return Groups(np.concatenate(members), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _group_sizes(lengths: NDArray[np.int64], max_tokens: int) -> list[int]:
    """Sizes of successive groups of increasing lengths: each is as large as the budget allows."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        # A group that ends before `stop` is padded to the length before it, the largest in it.
        most = max_tokens // int(lengths[start])
        padded = lengths[start : start + most] * np.arange(1, len(lengths[start : start + most]) + 1)
        count = int(np.searchsorted(padded, max_tokens, side="right"))
        sizes.append(count)
        start += count
    return sizes
