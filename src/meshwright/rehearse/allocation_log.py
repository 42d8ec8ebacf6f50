"""The allocation log of one process: every allocation and release of device memory, in order, by storage.

A storage is recorded when an operator returns a tensor on it, and released when torch frees it. FSDP2 resizes
the storages of gathered weights outside of any operator; that is recorded too. Bytes are rounded up to the
512 of CUDA's allocator, so that sums equal `torch.cuda.memory_allocated`.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.ops.torch_storages import storage_id
from meshwright.rehearse.torch_storages import resizes_reported

BLOCK_BYTES = 512


def rounded(num_bytes: int) -> int:
    """Bytes that CUDA's allocator hands out for a request of this size."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclasses.dataclass(slots=True)
class StorageRecord:
    """One storage: its present bytes, the operator that allocated it, and in which phase."""

    number: int
    num_bytes: int
    operator: str
    phase_id: int
    """Index of the phase in the trace's list of phases."""
    kind: str | None = None
    """What the storage is for (`weights`, `gathered` ...) where known; otherwise its phase decides."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An allocation (num_bytes > 0) or a release (num_bytes < 0) of one storage."""

    number: int
    """Number of the storage's record."""
    num_bytes: int
    phase_id: int
    stream: int
    """The stream whose memory pool serves it; FSDP2 copies and reduces on streams of its own."""


class AllocationLog:
    """Records the storages of this process and the order of their allocations and releases."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.records: list[StorageRecord] = []
        self.phase_id = 0
        self._host_storages: set[int] = set()
        self._streams: dict[int, int] = {}
        self._by_id: dict[int, StorageRecord] = {}
        self._references: dict[int, Any] = {}

    def record(self, tensor: Tensor, operator: str, kind: str | None = None) -> StorageRecord | None:
        """The record of a tensor's storage, made if it is new; None for host memory."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._host_storages:
            return None
        found = self._by_id.get(key)
        if found is not None:
            if kind is not None:
                found.kind = kind
            return found
        record = StorageRecord(len(self.records), 0, operator, self.phase_id, kind)
        self.records.append(record)
        self._assign(storage, record)
        self._set_size(record, storage.nbytes())
        return record

    def find(self, tensor: Tensor) -> StorageRecord | None:
        """The record of a tensor's storage, if it has one."""
        return self._by_id.get(storage_id(tensor.untyped_storage()))

    def exclude(self, tensor: Tensor) -> None:
        """Never record a tensor's storage: it is host memory, not the device's."""
        self._host_storages.add(storage_id(tensor.untyped_storage()))

    def reuse_storage(self, old: Tensor, new: Tensor) -> None:
        """Count `new` as written in place of `old`.

        Autograd's engine sums gradients in place for plain CUDA tensors; for a trace's tensors it allocates.
        """
        record = self.find(old)
        storage = new.untyped_storage()
        if record is None or storage_id(storage) in self._by_id:
            return
        before = storage_id(old.untyped_storage())
        del self._by_id[before], self._references[before]
        self._assign(storage, record)

    @contextlib.contextmanager
    def tracking_resizes(self) -> Iterator[None]:
        """Inside, storages that change their size are recorded."""
        with resizes_reported(self._resized):
            yield

    def _assign(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = storage_id(storage)
        self._by_id[key] = record
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        record = self._by_id.pop(key, None)
        self._references.pop(key, None)
        if record is not None:
            self._set_size(record, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        record = self._by_id.get(storage_id(storage))
        if record is not None:
            record.phase_id = self.phase_id
            record.kind = record.kind or "gathered"
            self._set_size(record, storage.nbytes())

    def _set_size(self, record: StorageRecord, num_bytes: int) -> None:
        size = rounded(num_bytes)
        if size == record.num_bytes:
            return
        if record.num_bytes:
            self._append(record, -record.num_bytes)
        if size:
            self._append(record, size)
        record.num_bytes = size

    def _append(self, record: StorageRecord, num_bytes: int) -> None:
        self.events.append(Event(record.number, num_bytes, self.phase_id, self._stream()))

    def _stream(self) -> int:
        """A number for the current stream; CPU streams do nothing, but FSDP2 enters them all the same."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), len(self._streams))
