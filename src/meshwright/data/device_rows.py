"""All sequences of a small dataset on the device: batches are gathered there, no token is copied in a step.

A row takes 2 bytes per token for most vocabularies, 1 for which targets count (4 with loss weights) and, with
separate documents, 4 for positions. The host keeps where documents begin.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.samples import PADDING, Rows
from meshwright.data.sources import token_dtype
from meshwright.data.stream import Stream
from meshwright.errors import DataError
from meshwright.units import show_bytes

_CHUNK_TOKENS = 1 << 22
_SIGNED = {"uint16": np.dtype(np.int16), "uint32": np.dtype(np.int32)}


class RowTensors(NamedTuple):
    """The tokens of several rows, in narrow types."""

    window_BW: Tensor
    """S + 1 tokens of each row: uint8, uint16 stored as int16, or int32."""
    weights_BS: Tensor
    """True where the target counts, or the loss weight of each target, float32."""
    positions_BS: Tensor | None
    """Positions, int32; None where each row counts from 0 to S - 1."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "RowTensors":
        """The rows with `change` applied to every tensor."""
        positions = None if self.positions_BS is None else change(self.positions_BS)
        return RowTensors(change(self.window_BW), change(self.weights_BS), positions)

    def to(self, device: torch.device) -> "RowTensors":
        """The same rows on a device; copies from pinned memory are asynchronous."""
        return self.each(lambda one: one.to(device, non_blocking=True))

    def pinned(self) -> "RowTensors":
        """The same rows in pinned memory."""
        return self.each(Tensor.pin_memory)


class HostRows(NamedTuple):
    """What the host knows of several rows."""

    documents_BS: NDArray[np.integer] | None
    """Document ids of each row; None when documents are joined."""
    num_targets_B: NDArray[np.int64]
    """Targets that count in each row."""


def row_tensors(rows: Rows) -> RowTensors:
    """Rows as tensors of the host."""
    weights = rows.counts_BS if rows.loss_weights_BS is None else rows.loss_weights_BS
    positions = None if rows.documents_BS is None else torch.from_numpy(rows.positions_BS.astype(np.int32))
    return RowTensors(
        torch.from_numpy(_as_signed(rows.window_BW)),
        torch.from_numpy(np.ascontiguousarray(weights)),
        positions,
    )


def row_bytes(stream: Stream) -> int:
    """Bytes of one sequence of a stream on the device."""
    samples, tokens = stream.samples, token_dtype(stream.samples.vocab_size).itemsize
    weights = 4 if _is_weighted(stream) else 1
    positions = 4 if samples.separate else 0
    return (samples.sequence_length + 1) * tokens + samples.sequence_length * (weights + positions)


class DeviceRows:
    """Every sample of a stream, and one row of padding, on the device."""

    def __init__(self, stream: Stream, device: torch.device, *, max_bytes: int) -> None:
        """Reads every sample; DataError where they take more than `max_bytes`."""
        samples = stream.samples
        self.num_bytes = (len(samples) + 1) * row_bytes(stream)
        if self.num_bytes > max_bytes:
            raise DataError(
                f"{len(samples):,} sequences take {show_bytes(self.num_bytes)} on the device, "
                f"on_device_bytes is {show_bytes(max_bytes)}",
                where="data.on_device_bytes",
                hint=f"use {self.num_bytes} or more, or 0: batches are then read ahead and copied",
            )
        samples.require_unchanged()
        size = max(1, _CHUNK_TOKENS // samples.sequence_length)
        ids = np.append(np.arange(len(samples), dtype=np.int64), PADDING)
        chunks = [_read(stream, ids[start : start + size], device) for start in range(0, len(ids), size)]
        positions = [one.positions_BS for one, _ in chunks if one.positions_BS is not None]
        self._rows = RowTensors(
            torch.cat([one.window_BW for one, _ in chunks]),
            torch.cat([one.weights_BS for one, _ in chunks]),
            torch.cat(positions) if positions else None,
        )
        documents = [one.documents_BS for _, one in chunks if one.documents_BS is not None]
        self._documents = np.concatenate(documents) if documents else None
        self._num_targets = np.concatenate([one.num_targets_B for _, one in chunks])
        if device.type == "cuda":  # batches are gathered on another stream
            torch.cuda.synchronize(device)

    def host(self, ids: NDArray[np.int64]) -> HostRows:
        """What the host knows of these rows."""
        documents = None if self._documents is None else self._documents[ids]
        return HostRows(documents, self._num_targets[ids])

    def take(self, ids_B: Tensor) -> RowTensors:
        """These rows, gathered on the device; PADDING, -1, is the last one."""
        places = torch.where(ids_B < 0, len(self._num_targets) - 1, ids_B)
        return self._rows.each(lambda one: one.index_select(0, places))


def _read(stream: Stream, ids: NDArray[np.int64], device: torch.device) -> tuple[RowTensors, HostRows]:
    rows = stream.samples.rows(ids)
    rows = rows._replace(window_BW=rows.window_BW.astype(token_dtype(stream.samples.vocab_size)))
    if _is_weighted(stream) and rows.loss_weights_BS is None:
        rows = rows._replace(loss_weights_BS=rows.counts_BS.astype(np.float32))
    documents = rows.documents_BS
    if documents is not None:
        documents = documents.astype(np.uint16 if documents.shape[1] <= 1 << 16 else np.int32)
    return row_tensors(rows).to(device), HostRows(documents, rows.counts_BS.sum(axis=1))


def _is_weighted(stream: Stream) -> bool:
    return any(part.source.loss_weights is not None for part in stream.parts)


def _as_signed(window: NDArray[np.unsignedinteger]) -> NDArray[np.integer]:
    """The same bytes in a type that every torch kernel reads."""
    return np.ascontiguousarray(window).view(_SIGNED.get(window.dtype.name, window.dtype))
