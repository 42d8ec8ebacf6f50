"""A loader of records from any source, with an exact position, for any training loop.

    loader = open_loader("images/", batch_samples=256, transform=decode, num_workers=4)
    for batch in loader: ...
    state = loader.state()      # a few integers and texts; loader.restore(state) goes on there

The global batch is a pure function of the position. A rank takes its share of each global batch, and a worker
prefetches full batches, so neither the number of ranks nor that of workers changes the stream.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

from torch.utils.data import Dataset, default_collate

from meshwright.data.feed import Feed, Feeding, FeedSharing, measured_feeding, open_feed
from meshwright.data.fetch import Fetcher, Transform
from meshwright.data.order import Blocks
from meshwright.data.readers.door import open_source
from meshwright.data.record_file import open_records, shuffle_of, weights_of
from meshwright.data.record_plan import OrderSettings, RecordPlan, Unit
from meshwright.data.records import Record, RecordSource
from meshwright.data.stream_position import require_same_stream
from meshwright.errors import DataError
from meshwright.ops.trees import pinned
from meshwright.spec.records import RecordsSpec
from meshwright.spec.records_file import is_records_file, read_records

Sources = str | Path | RecordSource | Sequence[str | Path | RecordSource]


class LoaderKeywords(TypedDict, total=False):
    """Settings of `open_loader`."""

    seed: int
    shuffle: bool | Blocks
    weights: Sequence[float]
    """Weights of several sources."""
    max_epochs: int | None
    max_tokens: int | None
    """Group samples of similar lengths, each group with at most this many padded tokens."""
    transform: Transform | None
    """`transform(record, rng)` makes a sample of a record; rng follows from seed, epoch and record."""
    collate: Callable[[list[Any]], Any] | None
    """Makes a batch of samples; None is torch's default, and plain lists of records without a transform."""
    num_workers: int | Literal["auto"]
    workers: Literal["threads", "processes"]
    prefetch: int
    pin_memory: bool
    timeout_seconds: float
    dp_rank: int
    dp_size: int
    max_bad_samples: int
    """Corrupt records that are replaced, each by one that follows from its number; one more is an error."""


class Loader:
    """An iterator of batches whose full state is `position`; use `open_loader` to build one."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        batch_units: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        feeding: Feeding | None = None,
        max_bad_samples: int = 0,
        sharing: FeedSharing | None = None,
    ) -> None:
        if batch_units % dp_size:
            raise DataError(
                f"batch_samples={batch_units} is not a multiple of {dp_size} data-parallel ranks",
                where="batch_samples",
                hint=f"use {-(-batch_units // dp_size) * dp_size}, or another number of ranks",
            )
        self.fetcher, self.plan, self.feeding = fetcher, fetcher.plan, feeding or Feeding()
        self.batch_units, self.dp_rank, self.dp_size = batch_units, dp_rank, dp_size
        self.position = 0
        """Units (records or groups) of all batches that were returned, over all ranks."""
        self.wait_seconds = 0.0
        """Time that the caller has waited for batches."""
        self.bad_samples: dict[str, str] = {}
        """Corrupt records that were replaced, by their place."""
        self._max_bad_samples = max_bad_samples
        self.is_counted = True
        """False for a filler: the last batch has fewer samples than ranks, and none for this one."""
        self._fetched: Feed | None = None
        self._sharing = sharing

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """This rank's part of the batch at `position`; StopIteration at the end of the stream."""
        size = self._size(self.position)
        if size == 0:
            raise StopIteration
        if self._fetched is None:
            self._fetched = self._open()
        asked_at = time.perf_counter()
        fetched = self._fetched.next()
        self.wait_seconds += time.perf_counter() - asked_at
        self.count_bad(fetched.bad)
        self.position += size
        share = self._share(size)
        self.is_counted = share.stop > share.start
        content = fetched.content
        return pinned(content) if self.feeding.pin_memory else content

    def state(self) -> dict[str, Any]:
        """The position and the stream that it counts in, as JSON; prefetched batches do not count."""
        return {"position": self.position, "stream": self.plan.number, "facts": dict(self.plan.facts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; DataError with the reason where it counts in another stream."""
        where = ", ".join(source.name for source in self.plan.sources)
        require_same_stream(state, facts=self.plan.facts, number=self.plan.number, where=where)
        self.close()
        self.position = int(state["position"])

    def close(self) -> None:
        """Stop reading ahead."""
        if self._fetched is not None:
            self._fetched.close()
        self._fetched = None

    def for_rank(self, dp_rank: int, dp_size: int, *, sharing: FeedSharing | None = None) -> "Loader":
        """One rank's part of the same stream, from its beginning; `sharing` may read it on another rank."""
        return Loader(
            self.fetcher,
            batch_units=self.batch_units,
            dp_rank=dp_rank,
            dp_size=dp_size,
            feeding=self.feeding,
            max_bad_samples=self._max_bad_samples,
            sharing=sharing,
        )

    def _open(self) -> Feed:
        def read() -> Feed:
            return open_feed(self.fetcher, self._local_units(self.position), self.feeding)

        return read() if self._sharing is None else self._sharing.feed(read)

    def _size(self, position: int) -> int:
        """Units of the global batch at a position: the last batch of the stream may be short."""
        end = self.plan.num_units
        return self.batch_units if end is None else max(0, min(self.batch_units, end - position))

    def _local_units(self, position: int) -> Iterator[list[Unit]]:
        """This rank's units of every batch from a position on; a rank without one reads a filler."""
        while size := self._size(position):
            units = self.plan.units(position, size)
            yield units[self._share(size)] or units[:1]
            position += size

    def _share(self, size: int) -> slice:
        """This rank's part of a global batch of `size` units."""
        return slice(size * self.dp_rank // self.dp_size, size * (self.dp_rank + 1) // self.dp_size)

    def count_bad(self, bad: Mapping[str, str]) -> None:
        """Add replaced records to `bad_samples`; DataError above the limit."""
        self.bad_samples |= bad
        if len(self.bad_samples) > self._max_bad_samples:
            where, fact = next(iter(bad.items()))
            raise DataError(
                f"{fact}; {len(self.bad_samples) - len(bad)} corrupt records were replaced before",
                where=where,
                hint=f"repair the source, or raise max_bad_samples above {self._max_bad_samples}",
            )


def open_loader(sources: Sources, *, batch_samples: int, **keywords: Unpack[LoaderKeywords]) -> Loader:
    """A loader of the records of a path, an address or a source, or of several with weights.

    A path that ends with .yaml is a records file, whose settings keywords override.
    `batch_samples` is the global batch: samples over all ranks, or groups of them with `max_tokens`.
    Every data-parallel rank builds one with its `dp_rank`; nothing is communicated. `num_workers="auto"`
    reads a few samples, chooses, and prints the choice.
    """
    if is_records_file(sources):
        spec = read_records(str(sources))
        sources, keywords = open_records(spec), {**_keywords_of(spec), **keywords}
    settings = OrderSettings(
        seed=keywords.get("seed", 0),
        shuffle=keywords.get("shuffle", True),
        weights=tuple(keywords["weights"]) if "weights" in keywords else None,
        max_epochs=keywords.get("max_epochs"),
        max_tokens=keywords.get("max_tokens"),
    )
    plan = RecordPlan(_opened(sources), settings)
    transform, max_bad = keywords.get("transform"), keywords.get("max_bad_samples", 0)
    collate = keywords.get("collate") or (default_collate if transform else list)
    fetcher = Fetcher(plan, transform, collate, replaces_bad=max_bad > 0)
    return Loader(
        fetcher,
        batch_units=batch_samples,
        dp_rank=keywords.get("dp_rank", 0),
        dp_size=keywords.get("dp_size", 1),
        feeding=_feeding(fetcher, keywords),
        max_bad_samples=max_bad,
    )


def _keywords_of(spec: RecordsSpec) -> LoaderKeywords:
    """The settings of a records file."""
    keywords: LoaderKeywords = {
        "seed": spec.seed,
        "shuffle": shuffle_of(spec),
        "max_epochs": spec.max_epochs,
        "max_tokens": spec.max_tokens,
        "num_workers": spec.num_workers,
        "workers": spec.workers,
        "prefetch": spec.prefetch,
        "max_bad_samples": spec.max_bad_samples,
    }
    weights = weights_of(spec)
    return keywords if weights is None else {**keywords, "weights": weights}


class RecordDataset(Dataset[Any]):
    """The records of a source as torch's map-style dataset, for `meshwright.fit` or torch's DataLoader."""

    def __init__(
        self, source: str | Path | RecordSource, transform: Callable[[Record], Any] | None = None
    ) -> None:
        self.source, self.transform = _opened(source)[0], transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """The record at `index`, transformed."""
        record = self.source.record(index)
        return record if self.transform is None else self.transform(record)


def _opened(sources: Sources) -> list[RecordSource]:
    if isinstance(sources, str | Path):
        return [open_source(sources)]
    if isinstance(sources, Sequence):
        return [found for one in sources for found in _opened(one)]
    return [sources]


def _feeding(fetcher: Fetcher, keywords: LoaderKeywords) -> Feeding:
    asked = keywords.get("num_workers", 0)
    if asked == "auto":
        feeding, reason = measured_feeding(fetcher, pin_memory=keywords.get("pin_memory", False))
        print(f"loader: {reason}", file=sys.stderr)
        return feeding
    return Feeding(
        num_workers=asked,
        workers=keywords.get("workers", "processes"),
        prefetch=keywords.get("prefetch", 2),
        pin_memory=keywords.get("pin_memory", False),
        timeout_seconds=keywords.get("timeout_seconds", 120.0),
    )
