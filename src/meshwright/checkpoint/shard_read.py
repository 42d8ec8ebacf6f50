"""Reads boxes of tensors from the shard files of a checkpoint; each chunk is verified while it is read.

Bytes go straight into the memory of the tensors where these are contiguous in host memory and of the saved
dtype. Other tensors (on a device, slices of columns, another dtype) are read by blocks of rows into host
memory and copied from there. Nothing in a shard file is ever executed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from meshwright.checkpoint.chunk_read import NUM_THREADS, ChunkedFile, Segment, is_intact, read_buffers
from meshwright.checkpoint.digest import DamagedCheckpoint, differs, require_size
from meshwright.checkpoint.shard_header import ShardHeader, StoredTensor

_NUM_AHEAD = 2 * NUM_THREADS
"""Chunks that are read before they are needed."""
_BLOCK_BYTES = 64 << 20
"""Bytes of rows that are read into host memory at once, for tensors that are not read straight."""

_Chunk = tuple[str, int]
"""A shard file, and the number of one of its chunks."""


class BoxPart(NamedTuple):
    """Slices of one saved box, which is a tensor in one shard file, and what they are read into."""

    file: str
    name: str
    slices: tuple[slice, ...]
    target: Tensor


class ShardFiles:
    """Open shard files of one checkpoint; use as a context.

    With `entries`, the files of the manifest, all that is read is compared with them. With `is_direct`, reads
    go past the page cache.
    """

    def __init__(
        self, folder: Path, entries: Mapping[str, Mapping[str, Any]] | None, *, is_direct: bool
    ) -> None:
        self._folder, self._entries, self._is_direct = folder, entries, is_direct
        self._files: dict[str, ChunkedFile] = {}
        self._headers: dict[str, ShardHeader] = {}
        self._buffers, self._threads = read_buffers(), ThreadPoolExecutor(NUM_THREADS, "load")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def read(self, parts: Iterable[BoxPart]) -> None:
        """Fill the targets of all parts; DamagedCheckpoint where a file is not what was saved."""
        planned = [one for part in parts for one in self._planned(part)]
        planned.sort(key=lambda part: (part.file, part.begin))
        parts_of = self._parts_of_chunks(planned)
        order = {chunk: number for number, chunk in enumerate(sorted(parts_of))}
        waiting, started = iter(order), list[Future[None]]()

        def start_until(number: int) -> None:
            for chunk in islice(waiting, max(0, number - len(started))):
                started.append(self._threads.submit(self._read_chunk, chunk, parts_of[chunk]))

        for part in planned:
            numbers = [order[chunk] for chunk in self._chunks(part)]
            start_until(max(numbers, default=-1) + 1 + _NUM_AHEAD)
            for number in numbers:
                started[number].result()
            part.finish()
        start_until(len(order))
        for future in started:
            future.result()

    def _parts_of_chunks(self, planned: Sequence["_PlannedPart"]) -> dict[_Chunk, list["_PlannedPart"]]:
        """The parts with bytes in each chunk, in the order of their bytes."""
        found: dict[_Chunk, list[_PlannedPart]] = {}
        if self._entries is not None:
            # The chunks of the header are compared too: with a wrong header, tensors would be exchanged.
            for name, header in self._headers.items():
                found |= {(name, chunk): [] for chunk in self._files[name].chunks(0, header.end)}
        for part in planned:
            for chunk in self._chunks(part):
                found.setdefault(chunk, []).append(part)
        return found

    def _chunks(self, part: "_PlannedPart") -> list[_Chunk]:
        return [(part.file, number) for number in self._files[part.file].chunks(part.begin, part.end)]

    def _read_chunk(self, chunk: _Chunk, parts: Sequence["_PlannedPart"]) -> None:
        self._files[chunk[0]].read(chunk[1], [part.segment() for part in parts], self._buffers)

    def _planned(self, part: BoxPart) -> list["_PlannedPart"]:
        """The part, or its blocks of rows where it is not read straight into its target."""
        with _damage_of(part, self._folder):
            stored = self._header(part.file).tensor(part.name)
            _require_slices(part, stored)
            if _is_read_straight(part, stored):
                return [_PlannedPart(part, stored, is_straight=True)]
            return [_PlannedPart(block, stored, is_straight=False) for block in _row_blocks(part, stored)]

    def _header(self, file: str) -> ShardHeader:
        if file not in self._headers:
            path, entry = self._folder / file, self._entries[file] if self._entries is not None else None
            if entry is not None:
                require_size(path, entry)
            if entry is not None and "sha256" in entry:  # one digest of the file: read once more for it
                if not is_intact(path, entry):
                    raise differs(path)
                entry = None
            self._headers[file] = ShardHeader(path)
            self._files[file] = ChunkedFile(path, entry, is_direct=self._is_direct)
        return self._headers[file]


class _PlannedPart:
    """A part whose bytes in its file are known."""

    def __init__(self, part: BoxPart, stored: StoredTensor, *, is_straight: bool) -> None:
        self.file, self._part, self._stored, self._is_straight = part.file, part, stored, is_straight
        row_bytes = _row_bytes(stored)
        rows = part.slices[0] if part.slices else slice(0, 1)
        self.begin, self.end = stored.begin + rows.start * row_bytes, stored.begin + rows.stop * row_bytes
        self._shape = (rows.stop - rows.start, *stored.shape[1:]) if stored.shape else ()
        self._lock = Lock()
        self._memory: Tensor | None = None

    def segment(self) -> Segment:
        """The bytes of this part, and where they go. Called by the threads that read."""
        with self._lock:
            if self._memory is None:
                allocated = self._part.target
                if not self._is_straight:
                    allocated = torch.empty(self._shape, dtype=self._stored.dtype, device="cpu")
                self._memory = allocated
            return Segment(self.begin, self.end, self._memory)

    def finish(self) -> None:
        """Copy what was read into the target; nothing is left to do where it was read straight into it."""
        if self._memory is not None and not self._is_straight:
            columns = self._part.slices[1:]
            self._part.target.copy_(self._memory[(slice(None), *columns)] if columns else self._memory)
        self._memory = None


def _require_slices(part: BoxPart, stored: StoredTensor) -> None:
    """Refuse slices that the stored tensor does not have."""
    if len(part.slices) != len(stored.shape):
        raise ValueError(f"its shape is {stored.shape}, and slices of {len(part.slices)} dims are wanted")
    sizes = tuple(each.stop - each.start for each in part.slices)
    is_outside = any(each.stop > size for each, size in zip(part.slices, stored.shape, strict=True))
    if is_outside or sizes != tuple(part.target.shape):
        raise ValueError(f"its shape is {stored.shape}, which has no box of {tuple(part.target.shape)}")


def _is_read_straight(part: BoxPart, stored: StoredTensor) -> bool:
    """Whether the bytes in the file are those of the target's memory."""
    target = part.target
    has_memory = type(target) in (Tensor, nn.Parameter) and target.device.type == "cpu"
    is_of_rows = all(
        each.stop - each.start == size for each, size in zip(part.slices[1:], stored.shape[1:], strict=True)
    )
    return has_memory and is_of_rows and target.is_contiguous() and target.dtype == stored.dtype


def _row_blocks(part: BoxPart, stored: StoredTensor) -> Iterator[BoxPart]:
    """The part as blocks of rows that bound the host memory of a load."""
    if not part.slices:
        yield part
        return
    rows, columns = part.slices[0], part.slices[1:]
    step = max(1, _BLOCK_BYTES // max(1, _row_bytes(stored)))
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        target = part.target[begin - rows.start : end - rows.start]
        yield BoxPart(part.file, part.name, (slice(begin, end), *columns), target)


def _row_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape[1:]) * stored.dtype.itemsize


@contextmanager
def _damage_of(part: BoxPart, folder: Path) -> Iterator[None]:
    """Inside, everything that a damaged file can raise is one error."""
    try:
        yield
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"tensor {part.name} cannot be read: {type(error).__name__}: {error}",
            where=str(folder / part.file),
            hint="use an older checkpoint: this one is damaged",
        ) from None
