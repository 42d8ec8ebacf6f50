"""A loader of `meshwright.open_loader` in `fit` and `prepare`: each rank reads its part of a batch.

The stream of samples is the loader's own: sources, weights, groups, shuffle, seed and epochs. Ranks, workers
and micro-batches do not change it. The position is saved with the facts that the stream depends on.
"""

import time
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch

from meshwright.data.feed import Feed, FeedSharing, open_feed
from meshwright.data.loader import Loader
from meshwright.data.record_plan import Unit
from meshwright.errors import DataError
from meshwright.modules.dataset import DatasetBatch, DatasetMicrobatch, SampleAssignment
from meshwright.modules.loop_guard import LoopGuard
from meshwright.ops.trees import on_device, pinned


def require_unsharded(loader: Loader) -> None:
    """DataError where the loader is already one rank's: `fit` and `prepare` distribute it themselves."""
    if loader.dp_size > 1:
        raise DataError(
            f"the loader was opened for rank {loader.dp_rank} of {loader.dp_size}",
            where="loader",
            hint="leave out dp_rank and dp_size: the ranks of the run share it",
        )


class _RecordPosition:
    """The position of a loader in its stream, which is its full state."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def num_epochs(self) -> int:
        """Complete passes over the records."""
        return self._loader.plan.num_epochs(self._loader.position)

    def state(self) -> dict[str, Any]:
        """The position and the stream that it counts in; prefetched batches do not count."""
        return self._loader.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; DataError with the reason where it counts in another stream."""
        require_record_state(state)
        self.close()
        self._loader.restore(state)

    def restart(self, state: dict[str, Any]) -> None:
        """Begin this stream, whatever the position in another one was."""
        del state
        self.close()
        self._loader.position = 0

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()


class RecordBatches(_RecordPosition):
    """Batches of a loader for `fit`, divided into micro-batches; `position` is the full state."""

    def __init__(
        self,
        loader: Loader,
        assignment: SampleAssignment,
        *,
        sample_tokens: int,
        device: torch.device,
        sharing: FeedSharing | None = None,
    ) -> None:
        """`sharing` may read the samples of this rank on another one."""
        super().__init__(loader)
        self._assignment, self._sharing = assignment, sharing
        self._sample_tokens, self._device = sample_tokens, device
        self.wait_seconds = 0.0
        """Time that the caller has waited for samples."""
        self._fetched: Feed | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DatasetBatch:
        """The batch at `position`; StopIteration at the end of the stream."""
        units = self._units(self._loader.position)
        if not units:
            raise StopIteration
        if self._fetched is None:
            self._fetched = self._open()
        asked_at = time.perf_counter()
        microbatches = tuple(
            DatasetMicrobatch(self._next_content(self._fetched), is_counted)
            for _, is_counted in self._assigned(units)
        )
        self.wait_seconds += time.perf_counter() - asked_at
        self._loader.position += len(units)
        ids = tuple(self._loader.plan.unit_id(unit) for unit in units)
        return DatasetBatch(microbatches, len(units) * self._sample_tokens, ids)

    def read_ahead(self) -> None:
        """Nothing: a batch is read when it is taken."""

    def read_again(self) -> None:
        """Nothing: a batch is read when it is taken."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the stream has no sample left."""
        return not self._units(self._loader.position)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._fetched is not None:
            self._fetched.close()
        self._fetched = None

    def _next_content(self, feed: Feed) -> Any:
        fetched = feed.next()
        self._loader.count_bad(fetched.bad)
        # A group of similar lengths is a micro-batch of its own.
        content = fetched.content if self._loader.plan.groups is None else fetched.content[0]
        return on_device(pinned(content) if self._device.type == "cuda" else content, self._device)

    def _open(self) -> Feed:
        def read() -> Feed:
            loader = self._loader
            return open_feed(loader.fetcher, self._units_from(loader.position), loader.feeding)

        return read() if self._sharing is None else self._sharing.feed(read)

    def _units(self, position: int) -> list[Unit]:
        return self._loader.plan.units(position, self._loader.batch_units)

    def _assigned(self, units: list[Unit]) -> list[tuple[list[Unit], bool]]:
        """(units, whether they count) of each micro-batch of this rank."""
        parts = self._assignment.microbatches(np.arange(len(units)))
        return [([units[place] for place in places], is_counted) for places, is_counted in parts]

    def _units_from(self, position: int) -> Iterator[list[Unit]]:
        """Units of this rank's micro-batches, from a position on."""
        while units := self._units(position):
            yield from (chosen for chosen, _ in self._assigned(units))
            position += len(units)


class RecordLoop(_RecordPosition):
    """A loader in a user's own loop (`prepare`): iterating it is the rest of the stream, on this rank.

    The end of the stream is the loader's `max_epochs`; without it the stream has no end.
    """

    def __init__(self, loader: Loader, *, device: torch.device) -> None:
        """`loader` is this rank's: `Loader.for_rank`."""
        super().__init__(loader)
        self._device = device
        self.epoch = 0
        """Always 0: epochs are part of the stream."""
        self.is_last = False
        """Whether the current batch is the last of the stream."""
        self.is_counted = True
        """False for a filler batch on a rank for which the stream has no sample left."""
        self.guard: LoopGuard | None = None

    @property
    def position(self) -> int:
        """Samples (or groups) that were returned, over all ranks."""
        return self._loader.position

    def __iter__(self) -> Iterator[Any]:
        for content in self._loader:
            self.is_counted = self._loader.is_counted
            self.is_last = self._loader.position == self._loader.plan.num_units
            if self.guard is not None:
                self.guard.num_batches += 1
            yield on_device(content, self._device)
        if self.guard is not None:
            self.guard.require_training()

    def __len__(self) -> int:
        """Batches of the stream on each rank; TypeError where it has no end."""
        if self._loader.plan.num_units is None:
            raise TypeError("the loader has no end: max_epochs is not set")
        return -(-self._loader.plan.num_units // self._loader.batch_units)


def require_record_state(state: dict[str, Any]) -> None:
    """DataError where a position was saved by another kind of dataset."""
    if "stream" not in state:
        raise DataError(
            "the saved position counts in a map-style dataset, and this run reads a loader",
            where="dataset",
            hint="use the dataset of the saved run, or another directory",
        )
