"""Every allocation and release of one process, in order, by storage.

A storage is written down when an operator returns a tensor on it, and crossed out when torch lets go of it.
FSDP2 keeps the storages of gathered weights and changes their size, outside of any operator: that is seen
too. Bytes are rounded up to the 512 of CUDA's allocator, so that sums are those of `memory_allocated`.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

BLOCK_BYTES = 512


def rounded(num_bytes: int) -> int:
    """What CUDA's allocator gives for a request."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclasses.dataclass(slots=True)
class Held:
    """One storage: its bytes now, who made it, and at which moment."""

    number: int
    num_bytes: int
    operator: str
    moment: int
    kind: str | None = None
    """Set where it is known what a storage is for; otherwise the moment tells."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A storage comes (bytes > 0) or goes (bytes < 0)."""

    number: int
    num_bytes: int
    moment: int
    stream: int
    """Whose pool it comes from; FSDP2 copies and reduces on streams of its own."""


class Ledger:
    """The storages of this process that hold bytes, and the order in which they came and went."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.held: dict[int, Held] = {}
        self.records: list[Held] = []
        self.moment = 0
        self.elsewhere: set[int] = set()
        """Storages of host memory: not the device's."""
        self._streams: dict[int, int] = {}
        self._by_pointer: dict[int, Held] = {}
        self._watches: dict[int, Any] = {}

    def see(self, tensor: Tensor, operator: str, kind: str | None = None) -> Held | None:
        """Write a tensor's storage down, if it is new."""
        storage = tensor.untyped_storage()
        pointer = storage._cdata
        if pointer in self.elsewhere:
            return None
        found = self._by_pointer.get(pointer)
        if found is not None:
            if kind is not None:
                found.kind = kind
            return found
        record = Held(len(self.records), 0, operator, self.moment, kind)
        self.records.append(record)
        self._by_pointer[pointer] = record
        self._watches[pointer] = weakref.ref(storage, lambda _: self._gone(pointer))
        self._resize(record, storage.nbytes())
        return record

    def find(self, tensor: Tensor) -> Held | None:
        """The record of a tensor's storage, if it has one."""
        return self._by_pointer.get(tensor.untyped_storage()._cdata)

    def take_over(self, old: Tensor, new: Tensor) -> None:
        """`new` was written where `old` was: torch may do that only for plain tensors, CUDA's are."""
        record = self.find(old)
        pointer = new.untyped_storage()._cdata
        if record is None or pointer in self._by_pointer:
            return
        old_pointer = old.untyped_storage()._cdata
        del self._by_pointer[old_pointer], self._watches[old_pointer]
        self._by_pointer[pointer] = record
        self._watches[pointer] = weakref.ref(new.untyped_storage(), lambda _: self._gone(pointer))

    def _gone(self, pointer: int) -> None:
        record = self._by_pointer.pop(pointer, None)
        self._watches.pop(pointer, None)
        if record is not None:
            self._resize(record, 0)

    def _resize(self, record: Held, num_bytes: int) -> None:
        size = rounded(num_bytes)
        if size == record.num_bytes:
            return
        if record.num_bytes:
            self._note(record, -record.num_bytes)
        if size:
            self._note(record, size)
        record.num_bytes = size

    def _note(self, record: Held, num_bytes: int) -> None:
        self.events.append(Event(record.number, num_bytes, self.moment, self._stream()))

    def _stream(self) -> int:
        """A number for the present stream; the CPU has streams in name, and contexts that enter them."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), len(self._streams))

    @contextlib.contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Inside, storages that change their size are seen."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            record = self._by_pointer.get(storage._cdata)
            if record is not None:
                record.moment = self.moment
                record.kind = record.kind or "gathered"
                self._resize(record, storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", watched):
            yield
