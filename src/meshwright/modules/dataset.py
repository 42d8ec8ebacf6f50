"""Samples of anybody's dataset, dealt out to ranks and micro-batches.

A batch of n samples is cut into as many even microbatches as there are ranks times micro-batches; piece
m x dp + r is micro-batch m of rank r. Every rank has the same number of micro-batches, so collectives meet.
Where fewer samples are left than ranks, a rank without one takes a sample that does not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError
from meshwright.ops.trees import on_device


class SampleSet(Protocol):
    """A dataset as torch knows it: samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DatasetMicrobatch(NamedTuple):
    """One micro-batch of one rank, as the loader's collate function made it."""

    content: Any
    is_counted: bool = True
    """False for a stand-in, which keeps ranks together and counts for nothing."""


@dataclass(frozen=True)
class DatasetBatch:
    """One rank's part of a global batch."""

    microbatches: tuple[DatasetMicrobatch, ...]
    num_positions: int
    """Over all ranks."""
    sample_ids: tuple[int, ...]
    """Of the global batch, in global order."""


@dataclass(frozen=True)
class SampleAssignment:
    """Who gets which samples of a batch."""

    microbatch_samples: int
    dp_rank: int
    dp_size: int

    def microbatches(self, ids: NDArray[np.int64]) -> list[tuple[list[int], bool]]:
        """(sample numbers, whether they count) of each micro-batch of this rank."""
        num_microbatches = -(-len(ids) // (self.microbatch_samples * self.dp_size))
        parts = np.array_split(ids, num_microbatches * self.dp_size)[self.dp_rank :: self.dp_size]
        return [(part.tolist(), True) if len(part) else ([int(ids[0])], False) for part in parts]


@dataclass(frozen=True)
class LoaderOptions:
    """How samples become tensors."""

    collate: Any = None
    """torch's default where absent."""
    num_workers: int = 0
    pin_memory: bool = False


class DatasetBatches:
    """Batches of a dataset in an order drawn from the seed; the whole state is `position`."""

    def __init__(
        self,
        dataset: SampleSet,
        order: SampleOrder,
        assignment: SampleAssignment,
        *,
        batch_samples: int,
        num_samples: int | None,
        sample_tokens: int,
        device: torch.device,
        options: LoaderOptions,
    ) -> None:
        self._dataset, self._order, self._deal, self._options = dataset, order, assignment, options
        self._batch_samples, self._num_samples = batch_samples, num_samples
        self._sample_tokens, self._device = sample_tokens, device
        self.position = 0
        self._ahead: Iterator[Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DatasetBatch:
        """The batch at `position`; StopIteration when the samples are used up."""
        ids = self._ids(self.position)
        if len(ids) == 0:
            raise StopIteration
        if self._ahead is None:
            self._ahead = iter(
                load_microbatches(self._dataset, self._pieces_from(self.position), self._options)
            )
        microbatches = self._deal.microbatches(ids)
        portions = tuple(
            DatasetMicrobatch(on_device(next(self._ahead), self._device), is_counted)
            for _, is_counted in microbatches
        )
        self.position += len(ids)
        return DatasetBatch(portions, len(ids) * self._sample_tokens, tuple(ids.tolist()))

    def state(self) -> dict[str, int]:
        """The position, and what it counts in."""
        return {"position": self.position, "num_samples": self._order.num_samples}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on at a saved position; DataError when the dataset has another number of samples."""
        if state["num_samples"] != self._order.num_samples:
            raise DataError(
                f"the saved position counts in {state['num_samples']} samples, "
                f"the dataset has {self._order.num_samples}",
                where="dataset",
                hint="use the dataset of the saved run",
            )
        self.position, self._ahead = state["position"], None

    def close(self) -> None:
        """Lets the workers go."""
        self._ahead = None

    def _ids(self, position: int) -> NDArray[np.int64]:
        stop = position + self._batch_samples
        stop = stop if self._num_samples is None else min(stop, self._num_samples)
        return self._order.sample_ids(position, max(0, stop - position))

    def _pieces_from(self, position: int) -> Iterator[list[int]]:
        while len(ids := self._ids(position)):
            yield from (numbers for numbers, _ in self._deal.microbatches(ids))
            position += len(ids)


def one_pass(
    dataset: SampleSet, assignment: SampleAssignment, *, device: torch.device, options: LoaderOptions
) -> Iterator[DatasetMicrobatch]:
    """Every sample of a dataset once, in order: this rank's micro-batches."""
    microbatches = assignment.microbatches(np.arange(len(dataset), dtype=np.int64))
    contents = load_microbatches(dataset, [numbers for numbers, _ in microbatches], options)
    for content, (_, is_counted) in zip(contents, microbatches, strict=True):
        yield DatasetMicrobatch(on_device(content, device), is_counted)


def load_microbatches(dataset: SampleSet, microbatches: Any, options: LoaderOptions) -> DataLoader[Any]:
    """Torch's loader over lists of sample numbers, which it may make ahead in worker processes."""
    return DataLoader(
        dataset,  # pyright: ignore[reportArgumentType]  anything with a length and numbers will do
        batch_sampler=microbatches if isinstance(microbatches, list) else _Generated(microbatches),
        collate_fn=options.collate,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
    )


class _Generated:
    """A batch sampler without a length."""

    def __init__(self, microbatches: Iterator[list[int]]) -> None:
        self._pieces = microbatches

    def __iter__(self) -> Iterator[list[int]]:
        return self._pieces


def require_samples(dataset: Any, *, where: str = "dataset") -> None:
    """Refuse what cannot be dealt out by number."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no length or no samples by number",
            where=where,
            hint="give it __len__ and __getitem__; a stream goes with meshwright.prepare",
        )
    if len(dataset) == 0:
        raise DataError(
            f"{type(dataset).__name__} has no samples",
            where=where,
            hint="look at how it was filtered or read",
        )
