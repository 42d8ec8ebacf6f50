"""Batches of one data-parallel rank, from a global order that does not depend on the number of ranks.

The global batch at position p is the samples p ... p + batch_sequences - 1 of the global order (during a
ramp the number of batches before it decides how many). Its rows are assigned by their place in it:
micro-batch m of data-parallel rank r gets the rows from (m dp + r) microbatch_sequences on. Every rank
computes the target count of the global batch from document ends, so a batch needs no communication. A batch
is a pure function of its position and index; a background thread prefetches the next ones.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data.bad_samples import BadSamples
from meshwright.data.device_rows import DeviceRows
from meshwright.data.local_batch import DeviceFeed, DropoutStep, Sent, read_local_batch
from meshwright.data.microbatch import Batch, BatchSharding, Microbatch
from meshwright.data.order import OrderCache
from meshwright.data.pair_samples import PairSamples
from meshwright.data.stream import Stream, open_stream
from meshwright.data.stream_position import require_same_stream
from meshwright.errors import DataError
from meshwright.spec import DataSpec

__all__ = ["Batch", "BatchSharding", "Batches", "Microbatch", "build_batches", "evaluation_batches"]

_PREFETCHED_BATCHES = 2


class Batches:
    """An endless or finite iterator of batches whose full state is `position` and `num_batches`.

    `position` is the global index of the next sample that was not returned yet, `num_batches` the number of
    batches that were; prefetched batches do not count.
    """

    def __init__(
        self,
        stream: Stream,
        sharding: BatchSharding,
        *,
        size_of: Callable[[int], int],
        max_bad_samples: int = 0,
        resident: DeviceRows | None = None,
        dropout_seed: int | None = None,
    ) -> None:
        """`resident` has all samples on the device; None: they are read from the stream. With `dropout_seed`
        batches have keys of dropout masks."""
        self._resident, self._dropout_seed = resident, dropout_seed
        self.stream, self.samples, self.order = stream, stream.samples, stream.order
        self.sharding, self._size_of = sharding, size_of
        self.position, self.num_batches = 0, 0
        self.wait_seconds = 0.0
        """Time that the caller has waited for batches."""
        self.bad_samples = BadSamples(max_bad_samples)
        self._ids, self._feed = OrderCache(stream.order), DeviceFeed(sharding.device)
        self._in_flight: deque[tuple[int, Future[Sent]]] = deque()
        self._worker = ThreadPoolExecutor(1, "batches", initializer=_use_device, initargs=(sharding.device,))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The batch at `position`; StopIteration at the end of the stream."""
        self._prefetch()
        if not self._in_flight:
            raise StopIteration
        position, future = self._in_flight.popleft()
        asked_at = time.perf_counter()
        sent = future.result()
        self.wait_seconds += time.perf_counter() - asked_at
        self.num_batches += 1
        self.position = position
        self._prefetch()
        return self._feed.receive(sent)

    def read_ahead(self) -> Exception | None:
        """Wait for the next batch, without taking it: the error of the data or of its storage; None where it
        is there, and at the end of the stream."""
        self._prefetch()
        if not self._in_flight:
            return None
        asked_at = time.perf_counter()
        error = self._in_flight[0][1].exception()
        self.wait_seconds += time.perf_counter() - asked_at
        return error if isinstance(error, DataError | OSError) else None

    def read_again(self) -> None:
        """Read the next batch again, after an error of `read_ahead`."""
        self._discard()
        self._prefetch()

    def state(self) -> dict[str, Any]:
        """The state for a resume: the position, the stream of samples that it counts in, and the batches."""
        return {
            "position": self.position,
            "stream": self.stream.number,
            "num_batches": self.num_batches,
            "facts": dict(self.stream.facts),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; DataError when it counts in another stream of samples."""
        stream = self.stream
        require_same_stream(state, facts=stream.facts, number=stream.number, where=self.samples.name)
        self._discard()
        self.position, self.num_batches = state["position"], state["num_batches"]

    def restart(self, state: dict[str, Any]) -> None:
        """Begin this stream of samples, after the batches that a run has taken from another one."""
        self._discard()
        self.position, self.num_batches = 0, state["num_batches"]

    @property
    def num_epochs(self) -> int:
        """Complete passes over the samples; of a blend, over all datasets together."""
        return self.position // sum(part.num_training for part in self.stream.parts)

    @property
    def is_exhausted(self) -> bool:
        """Whether the stream has no sample left."""
        return self.stream.num_samples is not None and self.position >= self.stream.num_samples

    def close(self) -> None:
        """Stop prefetching."""
        self._discard()
        self._worker.shutdown(wait=True)

    def _prefetch(self) -> None:
        end = self.stream.num_samples
        while len(self._in_flight) <= _PREFETCHED_BATCHES:
            start = self._in_flight[-1][0] if self._in_flight else self.position
            index = self.num_batches + len(self._in_flight)
            stop = start + self._size_of(index)
            stop = stop if end is None else min(stop, end)
            if stop <= start:
                return
            self._in_flight.append((stop, self._worker.submit(self._batch, index, start, stop - start)))

    def _batch(self, index: int, position: int, count: int) -> Sent:
        ids = self._ids.sample_ids(position, count)
        sharding = replace(self.sharding, batch_sequences=self._size_of(index))
        seed = self._dropout_seed
        host = read_local_batch(
            self.samples,
            ids,
            sharding,
            total_ids=ids,
            bad=self.bad_samples,
            resident=self._resident,
            dropout=None if seed is None else DropoutStep(seed, index),
        )
        return self._feed.send(host)

    def _discard(self) -> None:
        for _, future in self._in_flight:
            future.cancel()
        self._in_flight.clear()


def build_batches(
    spec: DataSpec,
    *,
    seed: int,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    has_dropout: bool = False,
) -> Batches:
    """The training batches of one data-parallel rank; `vocab_size` is the model's. No communication.

    `has_dropout`: batches have keys of dropout masks, which follow from `seed`.
    """
    stream = open_stream(spec, seed=seed, vocab_size=vocab_size)
    sharding = _sharding(spec, dp_rank=dp_rank, dp_size=dp_size, device=device, dtype=dtype)
    resident = None
    if spec.on_device_bytes:
        resident = DeviceRows(stream, sharding.device, max_bytes=spec.on_device_bytes)
    return Batches(
        stream,
        sharding,
        size_of=spec.batch_sequences_of,
        max_bad_samples=spec.max_bad_samples,
        resident=resident,
        dropout_seed=seed if has_dropout else None,
    )


def evaluation_batches(
    spec: DataSpec,
    *,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    every_sample: bool = False,
    reference: NDArray[np.float64] | None = None,
) -> Iterator[Batch]:
    """One pass over the held-out samples, in order, split like training batches, with padding rows.

    `every_sample` takes all samples instead. Weights divide by the target tokens of all
    evaluated samples (and `sequence_weights_B` by their number): the evaluation loss is the plain sum of loss
    x weight over all batches and ranks, however they are split. `reference` has the reference log-probs of
    preference pairs.
    """
    stream = open_stream(spec, seed=0, vocab_size=vocab_size)
    if isinstance(stream.samples, PairSamples):
        stream.samples.reference = reference
    sharding = _sharding(spec, dp_rank=dp_rank, dp_size=dp_size, device=device, dtype=dtype)
    evaluated = evaluation_ids(stream, every_sample=every_sample)
    for start in range(0, len(evaluated), spec.batch_sequences):
        ids = evaluated[start : start + spec.batch_sequences]
        yield read_local_batch(stream.samples, ids, sharding, total_ids=evaluated).on_device()


def evaluation_ids(stream: Stream, *, every_sample: bool = False) -> NDArray[np.int64]:
    """The held-out samples of a stream, or all samples."""
    return np.arange(len(stream.samples), dtype=np.int64) if every_sample else stream.held_out


def _sharding(
    spec: DataSpec, *, dp_rank: int, dp_size: int, device: torch.device | str, dtype: torch.dtype
) -> BatchSharding:
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:  # threads have a current device of their own
        place = torch.device("cuda", torch.cuda.current_device())
    return BatchSharding(spec.batch_sequences, spec.microbatch_sequences, dp_rank, dp_size, place, dtype)


def _use_device(device: torch.device) -> None:
    """Set the device of the background thread: pinning memory would otherwise open a context on device 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
