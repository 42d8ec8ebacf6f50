"""The loader of somebody's own loop, so that each data-parallel rank gets its part of it.

A DataLoader over numbered samples is dealt out by sample: its batch size is what one rank takes at once.
Any other iterable of batches is dealt out by batch. Either way an epoch hands out every sample once, and
every rank the same number of batches.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError
from meshwright.modules.dataset import DatasetMicrobatch, LoaderOptions, SampleAssignment, load_microbatches
from meshwright.ops.trees import on_device


class LoopLoader:
    """Iterate it once per epoch. It knows where it stands, so a resumed loop goes on in mid-epoch."""

    def __init__(
        self, loader: Iterable[Any], *, seed: int, dp_rank: int, dp_size: int, device: torch.device
    ) -> None:
        self._loader, self._seed, self._device = loader, seed, device
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._is_numbered = _is_numbered(loader)
        self.epoch = 0
        self.position = 0
        """Samples (or batches, where they have no numbers) of this epoch handed out, over all ranks."""
        self.is_last = False
        """Whether the batch at hand is the last of its epoch."""
        self.is_counted = True
        """False for a stand-in on a rank for which the epoch has no sample left."""

    def __iter__(self) -> Iterator[Any]:
        portions = self._numbered() if self._is_numbered else self._by_batch()
        for portion, position, is_last in _with_last(portions):
            self.position, self.is_last, self.is_counted = position, is_last, portion.is_counted
            yield on_device(portion.content, self._device)
        self.epoch, self.position, self.is_last = self.epoch + 1, 0, False

    def __len__(self) -> int:
        """Batches of one epoch on each rank; TypeError where the loader has no length."""
        if not self._is_numbered:
            return -(-len(self._loader) // self._dp_size)  # pyright: ignore[reportArgumentType]
        size = self._loader.batch_size * self._dp_size  # pyright: ignore[reportAttributeAccessIssue]
        return -(-self._num_samples() // size)

    def state(self) -> dict[str, Any]:
        """Where the loop stands."""
        done = self.is_last
        return {"epoch": self.epoch + done, "position": 0 if done else self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Nothing is made ahead between epochs."""

    def _num_samples(self) -> int:
        """Of one epoch, over all ranks."""
        loader: Any = self._loader
        size, count = loader.batch_size * self._dp_size, len(loader.dataset)
        return count // size * size if loader.drop_last else count

    def _numbered(self) -> Iterator[tuple[DatasetMicrobatch, int]]:
        """(micro-batch of this rank, position after it) for the rest of the epoch."""
        loader: Any = self._loader
        size, count = loader.batch_size * self._dp_size, self._num_samples()
        shuffle = isinstance(loader.sampler, RandomSampler)
        order = SampleOrder(len(loader.dataset), self._seed, shuffle)
        starts = range(self.position, count, size)
        begin = self.epoch * order.num_samples
        assignment = SampleAssignment(loader.batch_size, self._dp_rank, self._dp_size)
        dealt = [
            assignment.microbatches(order.sample_ids(begin + start, min(size, count - start)))[0]
            for start in starts
        ]
        options = LoaderOptions(loader.collate_fn, loader.num_workers, loader.pin_memory)
        contents = load_microbatches(loader.dataset, [numbers for numbers, _ in dealt], options)
        for start, content, (_, is_counted) in zip(starts, contents, dealt, strict=True):
            yield DatasetMicrobatch(content, is_counted), min(start + size, count)

    def _by_batch(self) -> Iterator[tuple[DatasetMicrobatch, int]]:
        """Every dp-th batch; where the last round is short, a rank without one repeats the round's first."""
        batches = islice(iter(self._loader), self.position, None)
        position = self.position
        while chosen := list(islice(batches, self._dp_size)):
            position += len(chosen)
            is_counted = self._dp_rank < len(chosen)
            yield DatasetMicrobatch(chosen[self._dp_rank if is_counted else 0], is_counted), position


def _with_last(
    portions: Iterator[tuple[DatasetMicrobatch, int]],
) -> Iterator[tuple[DatasetMicrobatch, int, bool]]:
    """Each with whether it is the last, which takes looking one ahead."""
    ahead = next(portions, None)
    while ahead is not None:
        (portion, position), ahead = ahead, next(portions, None)
        yield portion, position, ahead is None


def _is_numbered(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader, Iterable):
            raise DataError(
                f"{type(loader).__name__} cannot be iterated", where="loader", hint="give a DataLoader"
            )
        return False
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        raise DataError(
            f"{type(loader.sampler).__name__} makes an order of its own, which ranks cannot share",
            where="loader",
            hint="use shuffle=True or False, or give an iterable of batches that is the same on every rank",
        )
    if len(loader.dataset) == 0:  # pyright: ignore[reportArgumentType]
        raise DataError(
            "the loader's dataset has no samples", where="loader", hint="look at how it was filtered or read"
        )
    return True
