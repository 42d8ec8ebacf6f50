"""The loader of a user's own loop, distributed over data-parallel ranks.

A DataLoader over a map-style dataset is distributed by sample: its batch size is the number of samples that
one rank takes at once. Any other iterable of batches is distributed by batch. Either way an epoch has every
sample once, and every rank has the same number of batches.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError
from meshwright.modules.dataset import (
    DatasetMicrobatch,
    LoaderOptions,
    MicrobatchIds,
    SampleAssignment,
    Sharing,
    load_microbatches,
)
from meshwright.modules.loop_guard import LoopGuard
from meshwright.ops.trees import on_device


class LoopLoader:
    """The loader of one rank, iterated once per epoch. It saves its position, so a loop resumes mid-epoch."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        seed: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        sharing: Sharing | None = None,
    ) -> None:
        """`sharing` may read the batches of this rank on another one."""
        self._loader, self._seed, self._device = loader, seed, device
        self._dp_rank, self._dp_size, self._sharing = dp_rank, dp_size, sharing
        self._is_map_style = is_map_style(loader)
        self._ids = MicrobatchIds()
        self._contents: DataLoader[Any] | None = None
        """Torch's loader of this rank's samples; one for all epochs, with the settings of the user's."""
        self.epoch = 0
        self.position = 0
        """Samples (or batches, if distributed by batch) of this epoch already returned, over all ranks."""
        self.is_last = False
        """Whether the current batch is the last of its epoch."""
        self.is_counted = True
        """False for a filler batch on a rank for which the epoch has no sample left."""
        self.guard: LoopGuard | None = None

    def __iter__(self) -> Iterator[Any]:
        read = self._by_sample if self._is_map_style else self._by_batch
        microbatches = read() if self._sharing is None else self._sharing.each(read)
        for microbatch, position, is_last in _with_last(microbatches):
            self.position, self.is_last, self.is_counted = position, is_last, microbatch.is_counted
            if self.guard is not None:
                self.guard.num_batches += 1
            yield on_device(microbatch.content, self._device)
        if self.guard is not None:
            self.guard.require_training()
        self.epoch, self.position, self.is_last = self.epoch + 1, 0, False

    def __len__(self) -> int:
        """Batches of one epoch on each rank; TypeError where the loader has no length."""
        if not self._is_map_style:
            return -(-len(self._loader) // self._dp_size)  # pyright: ignore[reportArgumentType]
        size = self._loader.batch_size * self._dp_size  # pyright: ignore[reportAttributeAccessIssue]
        return -(-self._num_samples() // size)

    @property
    def num_epochs(self) -> int:
        """Complete passes over the samples."""
        return self.epoch + self.is_last

    def state(self) -> dict[str, Any]:
        """The epoch and the position in it."""
        done = self.is_last
        return {"epoch": self.epoch + done, "position": 0 if done else self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved epoch and position."""
        self.epoch, self.position = state["epoch"], state["position"]

    def restart(self, state: dict[str, Any]) -> None:
        """Begin the next epoch: the loader has other batches than that of the saved run."""
        self.epoch, self.position = state["epoch"] + bool(state["position"]), 0

    def close(self) -> None:
        """Free the loader and its worker processes."""
        self._contents = None

    def _num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        loader: Any = self._loader
        size, count = loader.batch_size * self._dp_size, len(loader.dataset)
        return count // size * size if loader.drop_last else count

    def _by_sample(self) -> Iterator[tuple[DatasetMicrobatch, int]]:
        """(micro-batch of this rank, position after it) for the rest of the epoch."""
        loader: Any = self._loader
        size, count = loader.batch_size * self._dp_size, self._num_samples()
        shuffle = isinstance(loader.sampler, RandomSampler)
        order = SampleOrder(len(loader.dataset), self._seed, shuffle)
        starts = range(self.position, count, size)
        begin = self.epoch * order.num_samples
        assignment = SampleAssignment(loader.batch_size, self._dp_rank, self._dp_size)
        assigned = [
            assignment.microbatches(order.sample_ids(begin + start, min(size, count - start)))[0]
            for start in starts
        ]
        self._ids.batches = [sample_ids for sample_ids, _ in assigned]
        if self._contents is None:
            self._contents = load_microbatches(loader.dataset, self._ids, LoaderOptions.of(loader))
        for start, content, (_, is_counted) in zip(starts, self._contents, assigned, strict=True):
            yield DatasetMicrobatch(content, is_counted), min(start + size, count)

    def _by_batch(self) -> Iterator[tuple[DatasetMicrobatch, int]]:
        """Every dp-th batch of the rest of the epoch, as in `_by_sample`.

        Where fewer batches than ranks are left, a rank without one gets the first of them as a filler.
        """
        batches = islice(iter(self._loader), self.position, None)
        position = self.position
        while chosen := list(islice(batches, self._dp_size)):
            position += len(chosen)
            is_counted = self._dp_rank < len(chosen)
            yield DatasetMicrobatch(chosen[self._dp_rank if is_counted else 0], is_counted), position


def _with_last(
    microbatches: Iterator[tuple[DatasetMicrobatch, int]],
) -> Iterator[tuple[DatasetMicrobatch, int, bool]]:
    """Each item with whether it is the last; reads one item ahead."""
    ahead = next(microbatches, None)
    while ahead is not None:
        (microbatch, position), ahead = ahead, next(microbatches, None)
        yield microbatch, position, ahead is None


def is_map_style(loader: Any) -> bool:
    """Whether a loader is distributed by sample; DataError where it has an order that ranks cannot share."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader, Iterable):
            raise DataError(
                f"{type(loader).__name__} is not iterable", where="loader", hint="pass a DataLoader"
            )
        return False
    is_plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
    if not is_plain or loader.batch_size is None or _draws_again(loader.sampler):
        raise DataError(
            f"{type(loader.sampler).__name__} is a custom sampler, whose order ranks cannot share",
            where="loader",
            hint="use shuffle=True or False, or pass an iterable of batches that is the same on every rank",
        )
    if len(loader.dataset) == 0:  # pyright: ignore[reportArgumentType]
        raise DataError(
            "the loader's dataset has no samples", where="loader", hint="check how it was filtered or read"
        )
    return True


def _draws_again(sampler: Any) -> bool:
    """Whether a RandomSampler draws with replacement, or another number of samples than the dataset has."""
    return isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )
