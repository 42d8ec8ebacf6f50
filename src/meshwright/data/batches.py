"""Batches of one data-parallel rank, from a global order that does not depend on the number of ranks.

The global batch at position p is the samples p ... p + batch_sequences - 1 of the global order (during a
ramp the number of batches before it decides how many). Its rows are assigned by their place in it:
micro-batch m of data-parallel rank r gets the rows from (m dp + r) microbatch_sequences on. Every rank
computes the target count of the global batch from document ends, so a batch needs no communication. A batch
is a pure function of its position and index; a background thread prefetches the next ones.
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
from meshwright.data.document_offsets import batch_documents
from meshwright.data.order import SampleOrder
from meshwright.data.samples import PADDING, Samples
from meshwright.data.sources import TokenFile, TokenSource
from meshwright.errors import DataError
from meshwright.spec import DataSpec

_PREFETCHED_BATCHES = 2


class Microbatch(NamedTuple):
    """One forward and backward of one rank.

    A pipeline's schedule concatenates the tensors of several micro-batches along dim 0 and splits them again.
    """

    tokens_BS: Tensor
    """Input tokens, int64."""
    targets_BS: Tensor
    """Target tokens, int64: the next token of each token."""
    weights_BS: Tensor
    """Loss weights: 1 / target tokens of the global batch where the target counts, else 0."""
    num_targets: int | None
    """Targets that count in the loss, or more; None where the tokens are sharded over cp."""
    positions_BS: Tensor
    """Positions, int64, from 0 at the start of the row and, with separate documents, of each document."""
    document_offsets_P: Tensor | None
    """Offsets of separate documents (document masking, varlen), int32, over the B x S tokens: a document is
    the tokens from one entry to the next. Of one length in all micro-batches of a batch: entries at the end
    repeat B x S. None for joined documents."""
    longest_document: int | None
    """Tokens of the longest document, or more; None for joined documents."""
    sequence_weights_B: Tensor
    """1 / sequences of the global batch, 0 for a padding row: for losses that average over sequences."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Microbatch":
        """The micro-batch with `change` applied to every tensor."""
        return Microbatch(
            tokens_BS=change(self.tokens_BS),
            targets_BS=change(self.targets_BS),
            weights_BS=change(self.weights_BS),
            num_targets=self.num_targets,
            positions_BS=change(self.positions_BS),
            document_offsets_P=(None if self.document_offsets_P is None else change(self.document_offsets_P)),
            longest_document=self.longest_document,
            sequence_weights_B=change(self.sequence_weights_B),
        )


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, and counts of the global batch."""

    microbatches: tuple[Microbatch, ...]
    num_tokens: int
    """Target tokens of the global batch that count in the loss."""
    num_sequences: int
    """Sequences of the global batch without padding rows."""
    sample_ids: tuple[int, ...]
    """Samples of the global batch, in global order."""

    @property
    def num_positions(self) -> int:
        """Positions of the global batch, whether or not their targets count."""
        return self.num_sequences * self.microbatches[0].tokens_BS.shape[1]


@dataclass(frozen=True)
class BatchSharding:
    """How a global batch is split over ranks and micro-batches, and the device and dtype of its tensors."""

    batch_sequences: int
    microbatch_sequences: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype
    """Dtype of the loss weights."""

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
        """This rank's sample ids, micro-batch after micro-batch, padded with PADDING."""
        rows = np.full(self.batch_sequences, PADDING, dtype=np.int64)
        rows[: len(ids)] = ids
        return rows.reshape(-1, self.dp_size, self.microbatch_sequences)[:, self.dp_rank].reshape(-1)


class Batches:
    """An endless or finite iterator of batches whose full state is `position` and `num_batches`.

    `position` is the global index of the next sample that was not returned yet, `num_batches` the number of
    batches that were; prefetched batches do not count.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        sharding: BatchSharding,
        *,
        max_epochs: int | None,
        size_of: Callable[[int], int],
    ) -> None:
        self.samples, self.order, self.sharding, self._size_of = samples, order, sharding, size_of
        self.num_samples = None if max_epochs is None else max_epochs * order.num_samples
        self.position, self.num_batches = 0, 0
        self._in_flight: deque[tuple[int, Future[Batch]]] = deque()
        self._worker = ThreadPoolExecutor(1, "batches", initializer=_use_device, initargs=(sharding.device,))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The batch at `position`; StopIteration after max_epochs."""
        self._prefetch()
        if not self._in_flight:
            raise StopIteration
        position, future = self._in_flight.popleft()
        batch = future.result()
        self.num_batches += 1
        self.position = position
        self._prefetch()
        return on_device(batch, self.sharding.device)

    def state(self) -> dict[str, int]:
        """The state for a resume: the position, the stream of samples that it counts in, and the batches."""
        return {"position": self.position, "stream": self._stream(), "num_batches": self.num_batches}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue at a saved position; DataError when it counts in another stream of samples."""
        if state["stream"] != self._stream():
            raise DataError(
                f"the saved position {state['position']} is from another dataset or another sample order",
                where=self.samples.source.name,
                hint="use the dataset, sequence length, holdout, shuffle and seed of the saved run",
            )
        self._discard()
        self.position, self.num_batches = state["position"], state["num_batches"]

    def restart(self, state: dict[str, int]) -> None:
        """Begin this stream of samples, after the batches that a run has taken from another one."""
        self._discard()
        self.position, self.num_batches = 0, state["num_batches"]

    @property
    def is_exhausted(self) -> bool:
        """Whether max_epochs leaves no sample."""
        return self.num_samples is not None and self.position >= self.num_samples

    def close(self) -> None:
        """Stop prefetching."""
        self._discard()
        self._worker.shutdown(wait=True)

    def _prefetch(self) -> None:
        while len(self._in_flight) <= _PREFETCHED_BATCHES:
            start = self._in_flight[-1][0] if self._in_flight else self.position
            index = self.num_batches + len(self._in_flight)
            stop = start + self._size_of(index)
            stop = stop if self.num_samples is None else min(stop, self.num_samples)
            if stop <= start:
                return
            self._in_flight.append((stop, self._worker.submit(self._batch, index, start, stop - start)))

    def _batch(self, index: int, position: int, count: int) -> Batch:
        ids = self.order.sample_ids(position, count)
        sharding = replace(self.sharding, batch_sequences=self._size_of(index))
        return build_local_batch(self.samples, ids, sharding, total_ids=ids)

    def _discard(self) -> None:
        for _, future in self._in_flight:
            future.cancel()
        self._in_flight.clear()

    def _stream(self) -> int:
        order, samples = self.order, self.samples
        facts = (
            samples.source.fingerprint,
            samples.sequence_length,
            order.num_samples,
            order.shuffle,
            order.seed,
        )
        # 48 bits are exact in JSON and in a float64.
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
    return Batches(samples, order, sharding, max_epochs=spec.max_epochs, size_of=spec.batch_sequences_of)


def evaluation_batches(
    spec: DataSpec,
    *,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    every_sample: bool = False,
) -> Iterator[Batch]:
    """One pass over the held-out samples, in order, split like training batches, with padding rows.

    `every_sample` takes all samples instead. Weights divide by the target tokens of all
    evaluated samples (and `sequence_weights_B` by their number): the evaluation loss is the plain sum of loss
    x weight over all batches and ranks, however they are split.
    """
    samples = open_samples(spec, vocab_size=vocab_size)
    sharding = _sharding(spec, dp_rank=dp_rank, dp_size=dp_size, device=device, dtype=dtype)
    evaluated = evaluation_ids(spec, samples, every_sample=every_sample)
    for start in range(0, len(evaluated), spec.batch_sequences):
        ids = evaluated[start : start + spec.batch_sequences]
        yield on_device(build_local_batch(samples, ids, sharding, total_ids=evaluated), sharding.device)


def evaluation_ids(spec: DataSpec, samples: Samples, *, every_sample: bool = False) -> NDArray[np.int64]:
    """The held-out samples of a spec, or all samples."""
    count = len(samples) if every_sample else spec.holdout_sequences
    return np.arange(len(samples) - count, len(samples), dtype=np.int64)


def _sharding(
    spec: DataSpec, *, dp_rank: int, dp_size: int, device: torch.device | str, dtype: torch.dtype
) -> BatchSharding:
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:  # threads have a current device of their own
        place = torch.device("cuda", torch.cuda.current_device())
    return BatchSharding(spec.batch_sequences, spec.microbatch_sequences, dp_rank, dp_size, place, dtype)


def open_samples(spec: DataSpec, *, vocab_size: int) -> Samples:
    """The samples of a spec; DataError when they do not fit the spec or the model."""
    samples = Samples(open_source(spec), spec.sequence_length, spec.documents == "separate")
    _require_vocabulary(samples.source, vocab_size)
    _require_enough(samples, spec)
    return samples


def open_source(spec: DataSpec) -> TokenSource:
    """The packed dataset or the generated corpus of a spec."""
    if (spec.path is None) == (spec.synthetic is None):
        fact = "neither path nor synthetic is set" if spec.path is None else "both path and synthetic are set"
        hint = "set data.path to the folder of a packed dataset, or data.synthetic for a generated corpus"
        raise DataError(fact, where="data", hint=hint)
    if spec.synthetic is not None:
        return generated_tokens(spec.synthetic)
    return TokenFile.open(str(spec.path))


def build_local_batch(
    samples: Samples, ids: NDArray[np.int64], sharding: BatchSharding, *, total_ids: NDArray[np.int64]
) -> Batch:
    """One rank's part of the global batch `ids`, on the host; weights divide by the totals of `total_ids`."""
    samples.source.require_unchanged()
    local_ids = sharding.local(ids)
    rows = samples.rows(local_ids)
    # At least 1: a batch in which no target counts has weight zero, not nan.
    token_weight = 1 / max(1, samples.num_targets(total_ids))
    weights = torch.from_numpy(rows.counts_BS * token_weight).to(sharding.dtype)
    sequence_weights = torch.from_numpy((local_ids != PADDING) / max(1, len(total_ids))).to(sharding.dtype)
    size = sharding.microbatch_sequences
    documents = None if rows.documents_BS is None else batch_documents(rows.documents_BS, size)
    local = Microbatch(
        tokens_BS=torch.from_numpy(rows.tokens_BS),
        targets_BS=torch.from_numpy(rows.targets_BS),
        weights_BS=weights,
        num_targets=None,
        positions_BS=torch.from_numpy(rows.positions_BS),
        document_offsets_P=None if documents is None else torch.from_numpy(documents.offsets_MP.ravel()),
        longest_document=None,
        sequence_weights_B=sequence_weights,
    )
    num_targets = rows.counts_BS.reshape(-1, size * samples.sequence_length).sum(axis=1).tolist()
    longest = [None] * len(num_targets) if documents is None else documents.longest_M
    parts = zip(_split(local, sharding), num_targets, longest, strict=True)
    return Batch(
        microbatches=tuple(
            part._replace(num_targets=count, longest_document=most) for part, count, most in parts
        ),
        num_tokens=samples.num_targets(ids),
        num_sequences=len(ids),
        sample_ids=tuple(ids.tolist()),
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; copies from pinned memory are still in flight when it returns."""
    return replace(
        batch,
        microbatches=tuple(
            one.each(lambda part: part.to(device, non_blocking=True)) for one in batch.microbatches
        ),
    )


def _use_device(device: torch.device) -> None:
    """Set the device of the background thread: pinning memory would otherwise open a context on device 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _split(batch: Microbatch, sharding: BatchSharding) -> tuple[Microbatch, ...]:
    batch = batch.each(Tensor.contiguous)
    if sharding.device.type == "cuda":  # only from pinned memory is a copy asynchronous
        batch = batch.each(Tensor.pin_memory)
    num_microbatches = len(batch.tokens_BS) // sharding.microbatch_sequences
    return tuple(
        batch.each(lambda part: part.chunk(num_microbatches)[index])  # noqa: B023  (called at once)
        for index in range(num_microbatches)
    )


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
            f"{num_tokens} tokens are fewer than one sequence and its target, {spec.sequence_length} + 1",
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
