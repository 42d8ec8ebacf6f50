"""The way to host memory and back: pinned buffers that are used again, and a stream for each direction."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.memory.offload.counters import Account
from meshwright.units import show_bytes


class Copied:
    """A copy that was started; whoever uses its result waits first."""

    def __init__(self, event: torch.cuda.Event | torch.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """The current stream goes on only when the copy is made; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None


class Lane:
    """Copies in one direction, in order, beside the stream that computes; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """Start to copy; whatever the current stream was given before comes first."""
        if self._stream is None:
            target.copy_(source)
            return Copied()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Copied(self._stream.record_event())


class HostBuffer:
    """Bytes of host memory, and the last copy that reads them."""

    def __init__(self, room: Tensor) -> None:
        self.bytes = room
        self.read = Copied()

    def shaped(self, like: Tensor) -> Tensor:
        """The buffer as a contiguous tensor of this shape and dtype."""
        return self.bytes.view(like.dtype).view(like.shape)


class HostPool:
    """Host buffers by size, pinned for CUDA. Every step asks for the same sizes, so it soon stops growing."""

    def __init__(self, account: Account, limit_bytes: int | None, allocate: Callable[[int], Tensor]) -> None:
        self._account, self._limit_bytes, self._allocate = account, limit_bytes, allocate
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of exactly this size; RunError where the host has no room for another one."""
        self._account.hold_on_host(num_bytes)
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        pool_bytes = self._account.pool_bytes + num_bytes
        if self._limit_bytes is not None and pool_bytes > self._limit_bytes:
            raise RunError(
                f"offload needs {show_bytes(pool_bytes)} of host memory on this rank, and may use "
                f"{show_bytes(self._limit_bytes)}",
                where="memory.offload",
                hint="offload less, or use more ranks or a smaller micro-batch",
            )
        self._account.pool_bytes = pool_bytes
        return HostBuffer(self._allocate(num_bytes))

    def give(self, buffer: HostBuffer) -> None:
        """Nobody needs what is in it any more."""
        self._account.hold_on_host(-buffer.bytes.nbytes)
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
        pages = _whole_pages(num_bytes)
        _pin(pages)
        self._pinned.append(pages)
        return pages[:num_bytes]


def _whole_pages(num_bytes: int) -> Tensor:
    """Memory that begins with a page and ends with one: a page can be pinned for one buffer only."""
    size = -(-num_bytes // PAGESIZE) * PAGESIZE
    room = torch.empty(size + PAGESIZE, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % PAGESIZE
    return room[begin : begin + size]


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
    """Everything that offload of one rank shares."""

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.device, self.account = device, Account()
        if allocate is None:
            allocate = PinnedMemory().allocate if device.type == "cuda" else pageable_memory
        self.pool = HostPool(self.account, limit_bytes, allocate)
        self._there, self._back = Lane(device), Lane(device)

    def send(self, source: Tensor, home: HostBuffer) -> Copied:
        """Start to copy a tensor of the device into its buffer."""
        home.read.wait()
        self.account.sent_bytes += source.nbytes
        return self._there.copy(home.shaped(source), source)

    def fetch(self, home: HostBuffer, target: Tensor) -> Copied:
        """Start to copy a buffer into a tensor of the device."""
        self.account.fetched_bytes += target.nbytes
        home.read = self._back.copy(target, home.shaped(target))
        return home.read


def settle(device: torch.device) -> None:
    """The host waits for all copies: before it reads what they bring."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
