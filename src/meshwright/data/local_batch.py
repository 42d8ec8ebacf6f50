"""One rank's part of a global batch: read into host memory in narrow types, and sent to the device.

Tokens travel in the type of their dataset (uint16 for most vocabularies) and once, not as inputs and targets.
The device widens them and makes positions and weights. On CUDA the host memory is pinned and the copy runs on
a stream of its own, so it overlaps with the step before.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.bad_samples import BadSamples
from meshwright.data.document_offsets import batch_documents
from meshwright.data.microbatch import Batch, BatchSharding, Microbatch
from meshwright.data.pair_samples import PairSamples
from meshwright.data.samples import PADDING, Rows, TokenSamples


@dataclass(frozen=True)
class HostBatch:
    """One rank's part of a global batch, in host memory."""

    window_BW: Tensor
    """S + 1 tokens of each row: uint8, uint16 stored as int16, or int32."""
    weights_BS: Tensor
    """True where the target counts, or the loss weight of each target, float32."""
    positions_BS: Tensor | None
    """Positions, int32; None where each row counts from 0 to S - 1."""
    offsets_X: Tensor | None
    """Offsets of documents of all micro-batches, one after the other."""
    sequence_weights_B: Tensor
    token_weight: float
    """1 / weight of all targets of the global batch."""
    sharding: BatchSharding
    num_targets: tuple[int, ...]
    """Targets that count in each micro-batch."""
    longest_documents: tuple[int | None, ...]
    num_tokens: int
    """Target tokens of the global batch that count."""
    sample_ids: tuple[int, ...]
    answers_BS: Tensor | None = None
    """Preference pairs: the answer of each target, int32."""
    pairs_BPF: Tensor | None = None
    """Preference pairs: weight and reference log-probs of each."""

    def pinned(self) -> "HostBatch":
        """The same batch in pinned memory, from which a copy to the device is asynchronous."""
        changed = {name: part.pin_memory() for name, part in vars(self).items() if isinstance(part, Tensor)}
        return HostBatch(**{**vars(self), **changed})

    def on_device(self) -> Batch:
        """The batch as the model reads it, on its device; copies may still be in flight."""
        device, dtype = self.sharding.device, self.sharding.dtype
        window = _widened(self.window_BW.to(device, non_blocking=True))
        weights = self.weights_BS.to(device, non_blocking=True)
        if weights.dtype == torch.bool:
            weights = weights.to(dtype) * self.token_weight
        else:
            weights = (weights.double() * self.token_weight).to(dtype)
        offsets = None if self.offsets_X is None else self.offsets_X.to(device, non_blocking=True)
        rows = Microbatch(
            tokens_BS=window[:, :-1].contiguous(),
            targets_BS=window[:, 1:].contiguous(),
            weights_BS=weights,
            num_targets=None,
            positions_BS=self._positions(device),
            document_offsets_P=offsets,
            longest_document=None,
            sequence_weights_B=self.sequence_weights_B.to(device, non_blocking=True),
            answers_BS=None
            if self.answers_BS is None
            else self.answers_BS.to(device, non_blocking=True).long(),
            pairs_BPF=None
            if self.pairs_BPF is None
            else self.pairs_BPF.to(device, non_blocking=True).to(dtype),
        )
        return Batch(self._split(rows), self.num_tokens, len(self.sample_ids), self.sample_ids)

    def _positions(self, device: torch.device) -> Tensor:
        if self.positions_BS is not None:
            return self.positions_BS.to(device, non_blocking=True).long()
        num_rows, length = self.weights_BS.shape
        return torch.arange(length, device=device).repeat(num_rows, 1)

    def _split(self, rows: Microbatch) -> tuple[Microbatch, ...]:
        count = len(self.num_targets)
        parts = (rows.each(lambda part: part.chunk(count)[index]) for index in range(count))  # noqa: B023
        facts = zip(parts, self.num_targets, self.longest_documents, strict=True)
        return tuple(
            part._replace(num_targets=num_targets, longest_document=longest)
            for part, num_targets, longest in facts
        )


def read_local_batch(
    samples: TokenSamples,
    ids: NDArray[np.int64],
    sharding: BatchSharding,
    *,
    total_ids: NDArray[np.int64],
    bad: BadSamples | None = None,
) -> HostBatch:
    """One rank's part of the global batch `ids`; weights divide by the totals of `total_ids`."""
    samples.require_unchanged()
    local_ids = sharding.local(ids)
    rows = samples.rows(local_ids) if bad is None else bad.rows(samples, local_ids)
    pairs = samples.row_pairs(rows, local_ids, total_ids) if isinstance(samples, PairSamples) else None
    # A batch in which no target counts has weight zero, not nan. Pairs have weights of their own.
    token_weight = 1 / (samples.targets(total_ids).weight or 1)
    sequence_weights = torch.from_numpy((local_ids != PADDING) / max(1, len(total_ids))).to(sharding.dtype)
    size = sharding.microbatch_sequences
    documents = None if rows.documents_BS is None else batch_documents(rows.documents_BS, size)
    num_targets = rows.counts_BS.reshape(-1, size * samples.sequence_length).sum(axis=1).tolist()
    host = HostBatch(
        window_BW=torch.from_numpy(_as_signed(rows.window_BW)),
        weights_BS=torch.from_numpy(_weights(rows)),
        positions_BS=None if documents is None else torch.from_numpy(rows.positions_BS.astype(np.int32)),
        offsets_X=None if documents is None else torch.from_numpy(documents.offsets_MP.ravel()),
        sequence_weights_B=sequence_weights,
        token_weight=token_weight if pairs is None else 1.0,
        sharding=sharding,
        num_targets=tuple(num_targets),
        longest_documents=(None,) * len(num_targets) if documents is None else documents.longest_M,
        num_tokens=samples.targets(ids).count,
        sample_ids=tuple(ids.tolist()),
        answers_BS=None if pairs is None else torch.from_numpy(pairs.answers_BS),
        pairs_BPF=None if pairs is None else torch.from_numpy(pairs.pairs_BPF),
    )
    return host.pinned() if sharding.device.type == "cuda" else host


def _weights(rows: Rows) -> NDArray[np.bool_ | np.float32]:
    return np.ascontiguousarray(rows.counts_BS if rows.loss_weights_BS is None else rows.loss_weights_BS)


_SIGNED = {"uint16": np.dtype(np.int16), "uint32": np.dtype(np.int32)}


def _as_signed(window: NDArray[np.unsignedinteger]) -> NDArray[np.integer]:
    """The same bytes in a type that every torch kernel reads."""
    return np.ascontiguousarray(window).view(_SIGNED.get(window.dtype.name, window.dtype))


def _widened(window: Tensor) -> Tensor:
    """Tokens as int64; an int16 has the bytes of a uint16."""
    wide = window.long()
    return wide.bitwise_and_(0xFFFF) if window.dtype == torch.int16 else wide


class Sent(NamedTuple):
    """A batch whose copy to the device was launched."""

    batch: Batch
    copied: torch.cuda.Event | None
    """Recorded after the copy; None on a CPU."""


class DeviceFeed:
    """Sends batches to a device on a CUDA stream of its own; on a CPU it does nothing more than widen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, host: HostBatch) -> Sent:
        """Launch the copy; called by the thread that reads batches."""
        if self._stream is None:
            return Sent(host.on_device(), None)
        with torch.cuda.stream(self._stream):
            batch, copied = host.on_device(), torch.cuda.Event()
            copied.record(self._stream)
            return Sent(batch, copied)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for the current stream, which waits for the copy on the device. No host sync."""
        if sent.copied is None:
            return sent.batch
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.copied)

        def used_by_step(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)  # its memory is not reused before the step has read it
            return tensor

        for one in sent.batch.microbatches:
            one.each(used_by_step)
        return sent.batch
