"""Ranks that compute on the same samples, of which one may read for all.

The tp, cp and pp ranks of one data-parallel rank compute on the same samples. Where reading and decoding cost
more than sending, the first of them reads each sample once and broadcasts it: tensors on the device of the
run, all other values pickled. The order of samples and the position do not change: every rank computes both
by itself. An error of the reader is raised on all ranks.
"""

import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.feed import Feed
from meshwright.data.fetch import Fetched
from meshwright.errors import MeshwrightError, RunError
from meshwright.mesh import Mesh
from meshwright.ops.trees import map_tensors, on_device, pinned, tensors_of, tree_map_only
from meshwright.spec.modules import Readers

MEASURED_SAMPLES = 16
# A broadcast is waited for, and reading overlaps with the step: reading must cost clearly more.
_MIN_READ_TO_SEND = 2.0


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Message:
    """What the reader sends ahead of the tensors."""

    content: Any = None
    """The samples, with a slot in the place of each tensor."""
    error: MeshwrightError | None = None
    is_end: bool = False


class ReadingGroup:
    """The ranks of one data-parallel rank; all of them call every method in the same order."""

    def __init__(self, mesh: Mesh, *, has_one_reader: bool = True) -> None:
        """`has_one_reader` False: each rank reads for itself, and nothing is communicated."""
        self._device, self._rank = mesh.device, mesh.rank
        axes = _sharing_axes(mesh) if has_one_reader else []
        self._groups = [mesh.group(axis) for axis in axes]

    @property
    def is_shared(self) -> bool:
        """Whether one rank reads for several."""
        return bool(self._groups)

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return all(group.rank() == 0 for group in self._groups)

    def share(self, read: Callable[[], Any]) -> Any:
        """What `read` returns on the reader, on the device of every rank; only the reader calls it.

        An error of `read`, StopIteration included, is raised on all ranks. Communicates.
        """
        if not self.is_shared:
            return on_device(read(), self._device)
        return self._received() if not self.reads else self._sent(read)

    def each(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Every item of the reader's iterator, on all ranks."""
        items: list[Iterator[Any]] = []

        def following() -> Any:
            if not items:
                items.append(read())  # here, so that an error of it reaches all ranks
            return next(items[0])

        while True:
            try:
                item = self.share(following)
            except StopIteration:
                return
            yield item

    def feed(self, open_feed: Callable[[], Feed]) -> Feed:
        """A feed that only the reader opens; its batches are on the device of every rank."""
        return _SharedFeed(self, open_feed) if self.is_shared else open_feed()

    def _sent(self, read: Callable[[], Any]) -> Any:
        message, content, failure = _Message(), None, None
        try:
            content = read()
            content = pinned(content) if self._device.type == "cuda" else content
            content = map_tensors(on_device(content, self._device), lambda one: one.detach().contiguous())
            message = _Message(map_tensors(content, _slot))
            text = pickle.dumps(message)
        except StopIteration as end:
            failure, text = end, pickle.dumps(_Message(is_end=True))
        except Exception as error:  # whatever it is, the other ranks must not wait
            failure, text = error, pickle.dumps(_Message(error=self._as_ours(error)))
        self._broadcast_text(text)
        if failure is not None:
            raise failure
        self._broadcast_tensors(tensors_of(content))
        return content

    def _received(self) -> Any:
        message: _Message = pickle.loads(self._broadcast_text(None))
        if message.is_end:
            raise StopIteration
        if message.error is not None:
            raise message.error
        content = tree_map_only(_Slot, self._empty, message.content)
        self._broadcast_tensors(tensors_of(content))
        return content

    def _empty(self, slot: _Slot) -> Tensor:
        return torch.empty(slot.shape, dtype=slot.dtype, device=self._device)

    def _as_ours(self, error: Exception) -> MeshwrightError:
        if isinstance(error, MeshwrightError):
            return error
        return RunError(
            f"rank {self._rank}, which reads for this rank, failed: {type(error).__name__}: {error}",
            where="data",
            hint="its own traceback says more; with readers=all each rank reads for itself",
        )

    def _broadcast_text(self, text: bytes | None) -> bytes:
        length = torch.tensor([len(text or b"")])
        self._broadcast(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        if text is not None:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._broadcast(content)
        return content.numpy().tobytes()

    def _broadcast_tensors(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._broadcast(tensor.view(-1).view(torch.uint8))

    def _broadcast(self, tensor: Tensor) -> None:
        """Broadcast along one axis after the other; ranks that a later axis reaches wait for it."""
        for number, group in enumerate(self._groups):
            if all(later.rank() == 0 for later in self._groups[number + 1 :]):
                dist.broadcast(tensor, group=group, group_src=0)


def open_reading_group(mesh: Mesh, readers: Readers, read: Callable[[int], Any]) -> ReadingGroup:
    """The ranks that compute on the same samples as this one, and who of them reads; all ranks call it.

    `auto` compares the time to read a few samples with the time to broadcast them, on rank 0, which prints
    the choice. `read(n)` reads the n-th few samples. Communicates.
    """
    group = ReadingGroup(mesh, has_one_reader=readers != "all")
    if readers != "auto" or not group.is_shared:
        return group
    return ReadingGroup(mesh, has_one_reader=_reading_costs_more(group, mesh, read))


def _reading_costs_more(group: ReadingGroup, mesh: Mesh, read: Callable[[int], Any]) -> bool:
    group.share(lambda: read(0))  # opens files and connections
    content, read_seconds = group.share(lambda: _timed(lambda: read(1)))
    send_seconds = min(_timed(lambda: _send(group, mesh, content))[1] for _ in range(2))
    choice = [read_seconds > _MIN_READ_TO_SEND * send_seconds]
    dist.broadcast_object_list(choice, src=0, device=torch.device("cpu"))
    if mesh.rank == 0:
        who = "one rank of each group reads and broadcasts" if choice[0] else "each rank reads for itself"
        times = f"{read_seconds * 1e3:.2f} ms to read {MEASURED_SAMPLES} samples"
        print(f"data: {times}, {send_seconds * 1e3:.2f} ms to broadcast them: {who}", file=sys.stderr)
    return choice[0]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started_at = time.perf_counter()
    return work(), time.perf_counter() - started_at


def _send(group: ReadingGroup, mesh: Mesh, content: Any) -> None:
    group.share(lambda: content)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def _sharing_axes(mesh: Mesh) -> list[str]:
    """The axes along which ranks have the same samples."""
    degrees = {"pp": mesh.parallel.pp, "cp": mesh.parallel.cp, "tp": mesh.parallel.tp}
    return [axis for axis, degree in degrees.items() if degree > 1]


class _SharedFeed:
    """The batches of the reader's feed."""

    def __init__(self, group: ReadingGroup, open_feed: Callable[[], Feed]) -> None:
        self._group, self._open = group, open_feed
        self._feed: Feed | None = None

    def next(self) -> Fetched:
        """The next batch, on the device of every rank."""
        return self._group.share(self._read)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._feed is not None:
            self._feed.close()

    def _read(self) -> Fetched:
        if self._feed is None:
            self._feed = self._open()  # here, so that an error of it reaches all ranks
        return self._feed.next()


def _slot(tensor: Tensor) -> Any:
    return _Slot(tuple(tensor.shape), tensor.dtype)
