"""Samples of a user's dataset, assigned to ranks and micro-batches.

A batch of n samples is split into as many even parts as there are ranks times micro-batches; part m x dp + r
is micro-batch m of rank r. Every rank has the same number of micro-batches, so their collectives match.
Where fewer samples are left than ranks, a rank without one computes a filler sample that does not count.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError
from meshwright.ops.trees import on_device


class SampleSet(Protocol):
    """A map-style dataset, as torch calls it: it has a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Resident(Protocol):
    """A dataset whose samples are all in the memory of the device."""

    def take(self, sample_ids: list[int], /) -> Any:
        """The collated batch of these samples."""
        ...


class Sharing(Protocol):
    """Ranks that compute on the same samples, of which one may read for all."""

    def each(self, read: Callable[[], Iterator[Any]], /) -> Iterator[Any]:
        """Every item of the reader's iterator, on all ranks."""
        ...


class DatasetMicrobatch(NamedTuple):
    """One micro-batch of one rank, as the loader's collate function made it."""

    content: Any
    is_counted: bool = True
    """False for a filler, which lets ranks run the same collectives and does not count in the loss."""


@dataclass(frozen=True)
class DatasetBatch:
    """One rank's part of a global batch."""

    microbatches: tuple[DatasetMicrobatch, ...]
    num_positions: int
    """Positions of the global batch."""
    sample_ids: tuple[int, ...]
    """Samples of the global batch, in global order."""


@dataclass(frozen=True)
class SampleAssignment:
    """Which samples of a batch a rank gets."""

    microbatch_samples: int
    dp_rank: int
    dp_size: int

    def microbatches(self, ids: NDArray[np.int64]) -> list[tuple[list[int], bool]]:
        """(sample ids, whether they count) of each micro-batch of this rank."""
        num_microbatches = -(-len(ids) // (self.microbatch_samples * self.dp_size))
        parts = np.array_split(ids, num_microbatches * self.dp_size)[self.dp_rank :: self.dp_size]
        return [(part.tolist(), True) if len(part) else ([int(ids[0])], False) for part in parts]


_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context", "in_order")
_KEPT = (*_OF_WORKERS, "worker_init_fn", "generator", "pin_memory_device")


@dataclass(frozen=True)
class LoaderOptions:
    """How samples become tensors."""

    collate: Any = None
    """The collate function; None is torch's default."""
    num_workers: int = 0
    pin_memory: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of torch's DataLoader, as the user has set them."""
    resident: Resident | None = None
    """All samples in the memory of the device: nothing is read in a step."""
    sharing: Sharing | None = None
    """Ranks that compute on the same samples, of which one may read for all; None: this rank reads."""

    @staticmethod
    def of(loader: DataLoader[Any]) -> "LoaderOptions":
        """The settings of a user's loader that decide how samples are loaded, not which."""
        others = {name: getattr(loader, name) for name in _KEPT if getattr(loader, name, None) is not None}
        if loader.num_workers == 0:  # torch refuses settings of workers without workers
            others = {name: value for name, value in others.items() if name not in _OF_WORKERS}
        return LoaderOptions(loader.collate_fn, loader.num_workers, loader.pin_memory, others)


class DatasetBatches:
    """Batches of a dataset in an order drawn from the seed; `position` is the full state."""

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
        """`options.sharing` may read the samples of this rank on another one."""
        self._dataset, self._order, self._assignment, self._options = dataset, order, assignment, options
        self._batch_samples, self._num_samples = batch_samples, num_samples
        self._sample_tokens, self._device = sample_tokens, device
        self.position = 0
        self.wait_seconds = 0.0
        """Time that the caller has waited for samples."""
        self._loader: Iterator[Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DatasetBatch:
        """The batch at `position`; StopIteration when the samples are used up."""
        ids = self._ids(self.position)
        if len(ids) == 0:
            raise StopIteration
        if self._loader is None:
            self._loader = self._contents_from(self.position)
        asked_at = time.perf_counter()
        microbatches = tuple(
            DatasetMicrobatch(on_device(next(self._loader), self._device), is_counted)
            for _, is_counted in self._assignment.microbatches(ids)
        )
        self.wait_seconds += time.perf_counter() - asked_at
        self.position += len(ids)
        return DatasetBatch(microbatches, len(ids) * self._sample_tokens, tuple(ids.tolist()))

    @property
    def num_epochs(self) -> int:
        """Complete passes over the samples."""
        return self.position // self._order.num_samples

    def state(self) -> dict[str, int]:
        """The position, and the number of samples of the dataset that it counts in."""
        return {"position": self.position, "num_samples": self._order.num_samples}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue at a saved position; DataError when the dataset has another number of samples."""
        if "num_samples" not in state:
            raise DataError(
                "the saved position counts in a loader, and this run reads a map-style dataset",
                where="dataset",
                hint="use the dataset of the saved run, or another directory",
            )
        if state["num_samples"] != self._order.num_samples:
            raise DataError(
                f"the saved position counts in {state['num_samples']} samples, "
                f"the dataset has {self._order.num_samples}",
                where="dataset",
                hint="use the dataset of the saved run",
            )
        self.position, self._loader = state["position"], None

    def restart(self, state: dict[str, int]) -> None:
        """Begin this dataset, whatever the position in another one was."""
        del state
        self.position, self._loader = 0, None

    def read_ahead(self) -> None:
        """Nothing: a batch is read when it is taken."""

    def read_again(self) -> None:
        """Nothing: a batch is read when it is taken."""

    @property
    def is_exhausted(self) -> bool:
        """Whether max_epochs leaves no sample."""
        return len(self._ids(self.position)) == 0

    def close(self) -> None:
        """Free the loader and its worker processes."""
        self._loader = None

    def _ids(self, position: int) -> NDArray[np.int64]:
        stop = position + self._batch_samples
        stop = stop if self._num_samples is None else min(stop, self._num_samples)
        return self._order.sample_ids(position, max(0, stop - position))

    def _contents_from(self, position: int) -> Iterator[Any]:
        """Contents of this rank's micro-batches, from a position on."""
        ids = self._ids_from(position)
        if self._options.resident is not None:
            return map(self._options.resident.take, ids)
        return read_microbatches(self._dataset, ids, self._options)

    def _ids_from(self, position: int) -> Iterator[list[int]]:
        """Sample ids of this rank's micro-batches, from a position on."""
        while len(ids := self._ids(position)):
            yield from (sample_ids for sample_ids, _ in self._assignment.microbatches(ids))
            position += len(ids)


def one_pass(
    dataset: SampleSet, assignment: SampleAssignment, *, device: torch.device, options: LoaderOptions
) -> Iterator[DatasetMicrobatch]:
    """This rank's micro-batches of one pass over a dataset, in order."""
    microbatches = assignment.microbatches(np.arange(len(dataset), dtype=np.int64))
    contents = read_microbatches(dataset, [sample_ids for sample_ids, _ in microbatches], options)
    for content, (_, is_counted) in zip(contents, microbatches, strict=True):
        yield DatasetMicrobatch(on_device(content, device), is_counted)


def read_microbatches(dataset: SampleSet, sample_ids: Any, options: LoaderOptions) -> Iterator[Any]:
    """The collated samples of each list of ids, read here or on another rank."""

    def read() -> Iterator[Any]:
        return iter(load_microbatches(dataset, sample_ids, options))

    return read() if options.sharing is None else options.sharing.each(read)


def load_microbatches(dataset: SampleSet, sample_ids: Any, options: LoaderOptions) -> DataLoader[Any]:
    """Torch's loader over lists of sample ids, which it may prefetch in worker processes."""
    return DataLoader(
        dataset,  # pyright: ignore[reportArgumentType]  any object with a length and samples by index will do
        batch_sampler=_Generated(sample_ids) if isinstance(sample_ids, Iterator) else sample_ids,
        collate_fn=options.collate,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        **options.others,
    )


class MicrobatchIds:
    """A batch sampler whose batches are set before each epoch, so that one loader and its workers last."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Generated:
    """A batch sampler without a length."""

    def __init__(self, sample_ids: Iterator[list[int]]) -> None:
        self._sample_ids = sample_ids

    def __iter__(self) -> Iterator[list[int]]:
        return self._sample_ids


def require_samples(dataset: Any, *, where: str = "dataset") -> None:
    """Refuse a dataset that is not map-style or that is empty."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no __len__ or no __getitem__",
            where=where,
            hint="give it both; an iterable dataset works with meshwright.prepare",
        )
    if len(dataset) == 0:
        raise DataError(
            f"{type(dataset).__name__} has no samples",
            where=where,
            hint="check how it was filtered or read",
        )
