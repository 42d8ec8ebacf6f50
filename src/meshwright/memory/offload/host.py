"""Copies to host memory and back: a pool of pinned buffers, and a CUDA stream for each direction."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.memory.offload.counters import OffloadCounters
from meshwright.units import show_bytes


class CopyEvent:
    """The end of an asynchronous copy; wait for it before its result is used."""

    def __init__(self, event: torch.cuda.Event | torch.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None


class CopyStream:
    """Copies in one direction, in order, on a CUDA stream of their own; on a CPU they are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start a copy, after all work that the current stream has now."""
        if self._stream is None:
            target.copy_(source)
            return CopyEvent()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return CopyEvent(self._stream.record_event())


class HostBuffer:
    """Bytes of host memory, and the last copy that reads them."""

    def __init__(self, storage: Tensor) -> None:
        self.bytes = storage
        self.read = CopyEvent()

    def view_as(self, like: Tensor) -> Tensor:
        """The buffer as a contiguous tensor of this shape and dtype."""
        return self.bytes.view(like.dtype).view(like.shape)


class HostPool:
    """Host buffers by size, reused. Every step asks for the same sizes, so the pool soon stops growing."""

    def __init__(
        self, counters: OffloadCounters, limit_bytes: int | None, allocate: Callable[[int], Tensor]
    ) -> None:
        self._counters, self._limit_bytes, self._allocate = counters, limit_bytes, allocate
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of exactly this size; RunError where the pool would exceed its limit."""
        self._counters.add_host_bytes(num_bytes)
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        pool_bytes = self._counters.pool_bytes + num_bytes
        if self._limit_bytes is not None and pool_bytes > self._limit_bytes:
            raise RunError(
                f"offload needs {show_bytes(pool_bytes)} of host memory on this rank, and may use "
                f"{show_bytes(self._limit_bytes)}",
                where="memory.offload",
                hint="offload less, or use more ranks or a smaller micro-batch",
            )
        self._counters.pool_bytes = pool_bytes
        return HostBuffer(self._allocate(num_bytes))

    def release(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool."""
        self._counters.add_host_bytes(-buffer.bytes.nbytes)
        self._free[buffer.bytes.nbytes].append(buffer)


def pageable_memory(num_bytes: int) -> Tensor:
    """Ordinary host memory of this size."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class PinnedMemory:
    """Allocates pinned host memory, which CUDA copies asynchronously; all of it is unpinned at the end."""

    def __init__(self) -> None:
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned)

    def allocate(self, num_bytes: int) -> Tensor:
        """Pinned host memory of this size."""
        if num_bytes == 0:
            return pageable_memory(0)
        pages = _full_pages(num_bytes)
        _pin(pages)
        self._pinned.append(pages)
        return pages[:num_bytes]


def _full_pages(num_bytes: int) -> Tensor:
    """Memory that starts and ends at page boundaries: a page can be pinned for one buffer only."""
    size = -(-num_bytes // PAGESIZE) * PAGESIZE
    memory = torch.empty(size + PAGESIZE, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % PAGESIZE
    return memory[begin : begin + size]


# Registered, not `pin_memory=True`: torch's pinned allocator rounds every size up to a power of two.
def _pin(buffer: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    failed = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if failed:
        raise RunError(
            f"{show_bytes(buffer.nbytes)} of host memory cannot be pinned (CUDA error {failed})",
            where="memory.offload",
            hint="is `ulimit -l` or the container's memory limit too low?",
        )


def _unpin(buffers: list[Tensor]) -> None:
    runtime: Any = torch.cuda.cudart()
    if buffers:
        torch.cuda.synchronize()
    for buffer in buffers:
        runtime.cudaHostUnregister(buffer.data_ptr())


class HostLink:
    """What all offload of one rank shares: the pool, the two streams and the counters."""

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.device, self.counters = device, OffloadCounters()
        if allocate is None:
            allocate = PinnedMemory().allocate if device.type == "cuda" else pageable_memory
        self.pool = HostPool(self.counters, limit_bytes, allocate)
        self._to_host, self._to_device = CopyStream(device), CopyStream(device)

    def send(self, source: Tensor, buffer: HostBuffer) -> CopyEvent:
        """Start to copy a device tensor into its host buffer."""
        buffer.read.wait()
        self.counters.sent_bytes += source.nbytes
        return self._to_host.copy(buffer.view_as(source), source)

    def fetch(self, buffer: HostBuffer, target: Tensor) -> CopyEvent:
        """Start to copy a host buffer into a device tensor (prefetch)."""
        self.counters.fetched_bytes += target.nbytes
        buffer.read = self._to_device.copy(target, buffer.view_as(target))
        return buffer.read


def synchronize(device: torch.device) -> None:
    """Make the host wait for all copies, before it reads their results."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
