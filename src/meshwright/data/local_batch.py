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
from meshwright.data.device_rows import DeviceRows, HostRows, RowTensors, row_tensors
from meshwright.data.document_offsets import batch_documents
from meshwright.data.microbatch import Batch, BatchSharding, Microbatch
from meshwright.data.pair_samples import PairSamples
from meshwright.data.samples import PADDING, TokenSamples
from meshwright.ops.dropout_keys import sequence_keys, token_keys


class DropoutStep(NamedTuple):
    """What the masks of one step's dropout follow from."""

    seed: int
    step: int
    """Number of batches before this one."""


class TakenRows(NamedTuple):
    """Rows that are on the device already."""

    resident: DeviceRows
    ids_B: Tensor

    def to(self, device: torch.device) -> RowTensors:
        """The rows, gathered on the device."""
        return self.resident.take(self.ids_B.to(device, non_blocking=True))

    def pinned(self) -> "TakenRows":
        """The same rows, with their numbers in pinned memory."""
        return TakenRows(self.resident, self.ids_B.pin_memory())


@dataclass(frozen=True)
class HostBatch:
    """One rank's part of a global batch, in host memory."""

    rows: RowTensors | TakenRows
    """The rows themselves, or which of the rows on the device."""
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
    dropout_keys_B: Tensor | None = None
    """Keys of the rows' dropout masks, int64."""

    def pinned(self) -> "HostBatch":
        """The same batch in pinned memory, from which a copy to the device is asynchronous."""
        changed = {name: part.pin_memory() for name, part in vars(self).items() if isinstance(part, Tensor)}
        return HostBatch(**{**vars(self), **changed, "rows": self.rows.pinned()})

    def on_device(self) -> Batch:
        """The batch as the model reads it, on its device; copies may still be in flight."""
        device, dtype = self.sharding.device, self.sharding.dtype
        narrow = self.rows.to(device)
        window, weights = _widened(narrow.window_BW), narrow.weights_BS
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
            positions_BS=_positions(narrow),
            document_offsets_P=offsets,
            longest_document=None,
            sequence_weights_B=self.sequence_weights_B.to(device, non_blocking=True),
            answers_BS=None
            if self.answers_BS is None
            else self.answers_BS.to(device, non_blocking=True).long(),
            pairs_BPF=None
            if self.pairs_BPF is None
            else self.pairs_BPF.to(device, non_blocking=True).to(dtype),
            dropout_keys_BS=None
            if self.dropout_keys_B is None
            else token_keys(self.dropout_keys_B.to(device, non_blocking=True), weights.shape[1]),
        )
        return Batch(self._split(rows), self.num_tokens, len(self.sample_ids), self.sample_ids)

    def _split(self, rows: Microbatch) -> tuple[Microbatch, ...]:
        count = len(self.num_targets)
        parts = (rows.each(lambda part: part.chunk(count)[index]) for index in range(count))  # noqa: B023
        facts = zip(parts, self.num_targets, self.longest_documents, strict=True)
        return tuple(
            part._replace(num_targets=num_targets, longest_document=longest)
            for part, num_targets, longest in facts
        )


def _positions(rows: RowTensors) -> Tensor:
    if rows.positions_BS is not None:
        return rows.positions_BS.long()
    num_rows, length = rows.weights_BS.shape
    return torch.arange(length, device=rows.weights_BS.device).repeat(num_rows, 1)


def read_local_batch(
    samples: TokenSamples,
    ids: NDArray[np.int64],
    sharding: BatchSharding,
    *,
    total_ids: NDArray[np.int64],
    bad: BadSamples | None = None,
    resident: DeviceRows | None = None,
    dropout: DropoutStep | None = None,
) -> HostBatch:
    """One rank's part of the global batch `ids`; weights divide by the totals of `total_ids`.

    `resident` has all samples on the device already. With `dropout` the batch has keys of dropout masks.
    """
    samples.require_unchanged()
    local_ids = sharding.local(ids)
    if resident is not None:
        tensors, known = TakenRows(resident, torch.from_numpy(local_ids)), resident.host(local_ids)
        pairs = None
    else:
        rows = samples.rows(local_ids) if bad is None else bad.rows(samples, local_ids)
        pairs = samples.row_pairs(rows, local_ids, total_ids) if isinstance(samples, PairSamples) else None
        tensors, known = row_tensors(rows), HostRows(rows.documents_BS, rows.counts_BS.sum(axis=1))
    # A batch in which no target counts has weight zero, not nan. Pairs have weights of their own.
    token_weight = 1 / (samples.targets(total_ids).weight or 1)
    sequence_weights = torch.from_numpy((local_ids != PADDING) / max(1, len(total_ids))).to(sharding.dtype)
    size = sharding.microbatch_sequences
    documents = None if known.documents_BS is None else batch_documents(known.documents_BS, size)
    num_targets = known.num_targets_B.reshape(-1, size).sum(axis=1).tolist()
    host = HostBatch(
        rows=tensors,
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
        dropout_keys_B=None
        if dropout is None
        else sequence_keys(*dropout, torch.from_numpy(sharding.local_indices())),
    )
    return host.pinned() if sharding.device.type == "cuda" else host


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
