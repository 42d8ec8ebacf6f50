"""Batches for one data-parallel rank, sharding from a global order that no number of ranks changes.

The global batch at position p is the samples p ... p + batch_sequences - 1 of the global order (during a
ramp the position tells how many). Its
rows are dealt out by their place in it: microbatch m of data-parallel rank r takes the rows from
(m dp + r) microbatch_sequences on. Every rank works out the target count of the whole batch from
document ends, so a batch needs no communication. A batch is a pure function of its position; the
background thread only makes the next ones early.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.corpus import generated_tokens
from meshwright.data.order import SampleOrder
from meshwright.data.samples import PADDING, Samples
from meshwright.data.sources import TokenFile, TokenSource
from meshwright.errors import DataError
from meshwright.spec import DataSpec

_BATCHES_AHEAD = 2


class Microbatch(NamedTuple):
    """One forward and backward of one rank; every tensor has B first, so a schedule may sharding it."""

    tokens_BS: Tensor
    """int64."""
    targets_BS: Tensor
    """int64: the successor of each token."""
    weights_BS: Tensor
    """1 / target tokens of the global batch where the target counts, else 0: losses times this add up."""
    positions_BS: Tensor
    """int64: from 0 at the start of the row and, with separate documents, of each document."""
    documents_BS: Tensor | None
    """int64: attention stays inside equal numbers; None when documents are joined."""
    sequence_weights_B: Tensor
    """1 / sequences of the global batch, 0 for a padding row: for losses that are means over sequences."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Microbatch":
        """With `change` applied to every tensor."""
        return Microbatch(
            tokens_BS=change(self.tokens_BS),
            targets_BS=change(self.targets_BS),
            weights_BS=change(self.weights_BS),
            positions_BS=change(self.positions_BS),
            documents_BS=None if self.documents_BS is None else change(self.documents_BS),
            sequence_weights_B=change(self.sequence_weights_B),
        )


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, and the facts of the whole of it."""

    microbatches: tuple[Microbatch, ...]
    num_tokens: int
    """Target tokens that count, over all ranks."""
    num_sequences: int
    """Over all ranks; padding not counted."""
    sample_ids: tuple[int, ...]
    """Of the global batch, in global order."""

    @property
    def num_positions(self) -> int:
        """Over all ranks, whether or not their targets count."""
        return self.num_sequences * self.microbatches[0].tokens_BS.shape[1]


@dataclass(frozen=True)
class BatchSharding:
    """How a global batch is dealt out to ranks and microbatches, and what the tensors are."""

    batch_sequences: int
    microbatch_sequences: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype
    """Of the weights."""

    def __post_init__(self) -> None:
        rows = self.microbatch_sequences * self.dp_size
        if self.batch_sequences % rows:
            raise DataError(
                f"batch_sequences={self.batch_sequences} is not a multiple of "
                f"microbatch_sequences={self.microbatch_sequences} x {self.dp_size} data-parallel ranks",
                where="data.batch_sequences",
                hint=f"use {-(-self.batch_sequences // rows) * rows}, or another microbatch or rank count",
            )

    def local(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's sample ids, microbatch after microbatch, filled up with PADDING."""
        rows = np.full(self.batch_sequences, PADDING, dtype=np.int64)
        rows[: len(ids)] = ids
        return rows.reshape(-1, self.dp_size, self.microbatch_sequences)[:, self.dp_rank].reshape(-1)


class Batches:
    """An endless or finite iterator of batches whose whole state is `position`.

    `position` is the global index of the next sample not yet handed out; batches that were only made
    ahead of time do not count.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        sharding: BatchSharding,
        *,
        max_epochs: int | None,
        size_at: Callable[[int], int],
    ) -> None:
        self.samples, self.order, self.sharding, self._size_at = samples, order, sharding, size_at
        self.num_samples = None if max_epochs is None else max_epochs * order.num_samples
        self.position = 0
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        self._worker = ThreadPoolExecutor(1, "batches", initializer=_use_device, initargs=(sharding.device,))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The batch at `position`; StopIteration after max_epochs."""
        self._make_ahead()
        if not self._ahead:
            raise StopIteration
        position, future = self._ahead.popleft()
        batch = future.result()
        self.position = position
        self._make_ahead()
        return on_device(batch, self.sharding.device)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in the training part of the data."""
        return self.order.num_samples

    def state(self) -> dict[str, int]:
        """All a resume needs: the position, and which stream of samples it counts in."""
        return {"position": self.position, "stream": self._stream()}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue at a saved position; DataError when it counts in another stream of samples."""
        if state["stream"] != self._stream():
            raise DataError(
                f"the saved position {state['position']} belongs to other data or another order of it",
                where=self.samples.source.name,
                hint="use the dataset, sequence length, holdout, shuffle and seed of the saved run",
            )
        self._discard()
        self.position = state["position"]

    def close(self) -> None:
        """Stop making batches ahead."""
        self._discard()
        self._worker.shutdown(wait=True)

    def _make_ahead(self) -> None:
        while len(self._ahead) <= _BATCHES_AHEAD:
            start = self._ahead[-1][0] if self._ahead else self.position
            stop = start + self._size_at(start)
            stop = stop if self.num_samples is None else min(stop, self.num_samples)
            if stop <= start:
                return
            self._ahead.append((stop, self._worker.submit(self._batch, start, stop - start)))

    def _batch(self, position: int, count: int) -> Batch:
        ids = self.order.sample_ids(position, count)
        sharding = replace(self.sharding, batch_sequences=self._size_at(position))
        return build_local_batch(self.samples, ids, sharding, total_ids=ids)

    def _discard(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _stream(self) -> int:
        order, samples = self.order, self.samples
        facts = (
            samples.source.fingerprint,
            samples.sequence_length,
            order.num_samples,
            order.shuffle,
            order.seed,
        )
        # 48 bits: exact in JSON and in a tensor of any type that holds integers that size.
        return int(hashlib.sha256(repr(facts).encode()).hexdigest()[:12], 16)


def build_batches(
    spec: DataSpec,
    *,
    seed: int,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Batches:
    """The training batches of one data-parallel rank; `vocab_size` is the model's. No communication."""
    samples = open_samples(spec, vocab_size=vocab_size)
    num_training = len(samples) - spec.holdout_sequences
    order = SampleOrder(num_training, seed, spec.shuffle)
    sharding = _sharding(spec, dp_rank=dp_rank, dp_size=dp_size, device=device, dtype=dtype)
    return Batches(samples, order, sharding, max_epochs=spec.max_epochs, size_at=spec.batch_sequences_at)


def evaluation_batches(
    spec: DataSpec,
    *,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[Batch]:
    """The held-out samples once, in order, sharding like training batches and filled up with padding rows.

    Weights divide by the target tokens of the whole holdout (and `sequence_weights_B` by its sequences):
    the evaluation loss is the plain sum of loss x weight over all batches and ranks, whatever the sharding.
    """
    samples = open_samples(spec, vocab_size=vocab_size)
    sharding = _sharding(spec, dp_rank=dp_rank, dp_size=dp_size, device=device, dtype=dtype)
    holdout = np.arange(len(samples) - spec.holdout_sequences, len(samples), dtype=np.int64)
    for start in range(0, len(holdout), spec.batch_sequences):
        ids = holdout[start : start + spec.batch_sequences]
        yield on_device(build_local_batch(samples, ids, sharding, total_ids=holdout), sharding.device)


def _sharding(
    spec: DataSpec, *, dp_rank: int, dp_size: int, device: torch.device | str, dtype: torch.dtype
) -> BatchSharding:
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:  # threads have a current device of their own
        place = torch.device("cuda", torch.cuda.current_device())
    return BatchSharding(spec.batch_sequences, spec.microbatch_sequences, dp_rank, dp_size, place, dtype)


def open_samples(spec: DataSpec, *, vocab_size: int) -> Samples:
    """The samples that a spec describes; DataError when they do not suit it or the model."""
    samples = Samples(open_source(spec), spec.sequence_length, spec.documents == "separate")
    _require_vocabulary(samples.source, vocab_size)
    _require_enough(samples, spec)
    return samples


def open_source(spec: DataSpec) -> TokenSource:
    """The packed dataset or the generated corpus of a spec."""
    if (spec.path is None) == (spec.synthetic is None):
        count = "none" if spec.path is None else "both"
        hint = "give the folder of a packed dataset as data.path, or data.synthetic for a generated corpus"
        raise DataError(f"{count} of path and synthetic is given, one is needed", where="data", hint=hint)
    if spec.synthetic is not None:
        return generated_tokens(spec.synthetic)
    return TokenFile.open(str(spec.path))


def build_local_batch(
    samples: Samples, ids: NDArray[np.int64], sharding: BatchSharding, *, total_ids: NDArray[np.int64]
) -> Batch:
    """One rank's part of the global batch `ids`, on the host; weights divide by the totals of `total_ids`."""
    local = sharding.local(ids)
    rows = samples.rows(local)
    # At least 1: a batch in which no target counts has weight zero, not not-a-number.
    token_weight = 1 / max(1, samples.num_targets(total_ids))
    weights = torch.from_numpy(rows.counts_BS * token_weight).to(sharding.dtype)
    sequence_weights = torch.from_numpy((local != PADDING) / max(1, len(total_ids))).to(sharding.dtype)
    whole = Microbatch(
        tokens_BS=torch.from_numpy(rows.tokens_BS),
        targets_BS=torch.from_numpy(rows.targets_BS),
        weights_BS=weights,
        positions_BS=torch.from_numpy(rows.positions_BS),
        documents_BS=None if rows.documents_BS is None else torch.from_numpy(rows.documents_BS),
        sequence_weights_B=sequence_weights,
    )
    return Batch(
        microbatches=_split(whole, sharding),
        num_tokens=samples.num_targets(ids),
        num_sequences=len(ids),
        sample_ids=tuple(ids.tolist()),
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; from pinned memory this returns before the copies are done."""
    return replace(
        batch,
        microbatches=tuple(
            one.each(lambda part: part.to(device, non_blocking=True)) for one in batch.microbatches
        ),
    )


def _use_device(device: torch.device) -> None:
    """In the background thread: pinning memory there would otherwise open a context on device 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _split(whole: Microbatch, sharding: BatchSharding) -> tuple[Microbatch, ...]:
    whole = whole.each(Tensor.contiguous)
    if sharding.device.type == "cuda":  # only from pinned memory is a copy asynchronous
        whole = whole.each(Tensor.pin_memory)
    size, num_rows = sharding.microbatch_sequences, len(whole.tokens_BS)
    return tuple(_rows(whole, start, start + size) for start in range(0, num_rows, size))


def _rows(whole: Microbatch, start: int, stop: int) -> Microbatch:
    return whole.each(lambda part: part[start:stop])


def _require_vocabulary(source: TokenSource, vocab_size: int) -> None:
    if source.vocab_size > vocab_size:
        raise DataError(
            f"the dataset's vocabulary has {source.vocab_size} tokens, the model's only {vocab_size}",
            where=source.name,
            hint=f"set model.vocab_size to {source.vocab_size} or more, or pack with the model's tokenizer",
        )


def _require_enough(samples: Samples, spec: DataSpec) -> None:
    num_tokens = len(samples.source.tokens)
    if len(samples) == 0:
        raise DataError(
            f"{num_tokens} tokens are fewer than one sequence: {spec.sequence_length} and one more as target",
            where=samples.source.name,
            hint=f"use data.sequence_length={max(1, num_tokens - 1)} or less, or more data",
        )
    if len(samples) <= spec.holdout_sequences:
        raise DataError(
            f"holdout_sequences={spec.holdout_sequences} leaves nothing to train on: "
            f"the data has {len(samples)} sequences of {spec.sequence_length} tokens",
            where="data.holdout_sequences",
            hint=f"use {len(samples) - 1} or fewer",
        )
