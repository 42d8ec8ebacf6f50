"""Reads chunks of checkpoint files, compares them with the manifest, and copies them to where they belong.

Several threads read pieces of a few MiB at the same time. Each piece is hashed and copied while it is in the
processor's cache. Reads go past the page cache (O_DIRECT) where the caller wants it and the file system
allows it: the processor then neither fills pages nor copies from them.
"""

import ctypes
import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import xxhash
from torch import Tensor

from meshwright.checkpoint.digest import CHUNK_BYTES, DamagedCheckpoint, differs, require_size
from meshwright.checkpoint.host_bytes import (
    BLOCK_BYTES,
    aligned_buffer,
    bytes_of,
    open_direct,
    use_page_cache,
)
from meshwright.errors import CheckpointError

NUM_THREADS = 4
"""Reads in flight: with fewer of them the disk waits while a piece is hashed."""
_PIECE_BYTES = 2 << 20

Buffers = SimpleQueue[Tensor]


class Segment(NamedTuple):
    """Bytes of a file, and the host memory that they are copied to."""

    begin: int
    end: int
    target: Tensor
    """Contiguous, of `end - begin` bytes."""


def read_buffers() -> Buffers:
    """A buffer for each thread that reads."""
    buffers: Buffers = SimpleQueue()
    for _ in range(NUM_THREADS):
        buffers.put(aligned_buffer(_PIECE_BYTES))
    return buffers


class ChunkedFile:
    """A file of a checkpoint that is read chunk by chunk. Use as a context.

    With its entry in the manifest, each chunk is compared; without one nothing is.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any] | None, *, is_direct: bool = False) -> None:
        self.path, self._entry = path, entry
        self.num_bytes: int = path.stat().st_size if entry is None else entry["bytes"]
        self._chunk_bytes: int = CHUNK_BYTES
        if entry is not None:
            self._chunk_bytes = entry.get("chunk_bytes", max(1, self.num_bytes))
        is_direct = is_direct and self._chunk_bytes % BLOCK_BYTES == 0
        self._descriptor = open_direct(path, os.O_RDONLY) if is_direct else os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def chunks(self, begin: int, end: int) -> range:
        """Numbers of the chunks with these bytes."""
        return range(begin // self._chunk_bytes, -(-end // self._chunk_bytes))

    def read(self, chunk: int, segments: Sequence[Segment], buffers: Buffers) -> None:
        """Read one chunk and copy its segments; DamagedCheckpoint where it differs or cannot be read.

        The segments are in their order and do not overlap; they may reach into other chunks. Where nothing is
        compared, only the bytes of the segments are read.
        """
        begin = chunk * self._chunk_bytes
        end = min(begin + self._chunk_bytes, self.num_bytes)
        if self._entry is None:
            first = max(begin, segments[0].begin) if segments else end
            begin = begin + (first - begin) // BLOCK_BYTES * BLOCK_BYTES
            end = min(end, segments[-1].end) if segments else end
        digest, expected = self._digest(chunk)
        buffer = buffers.get()
        try:
            while begin < end:
                wanted = min(end - begin, buffer.nbytes)
                found = self._read_at(buffer, begin, wanted)
                if digest is not None:
                    digest.update(bytes_of(buffer[:found]))
                for segment in segments:
                    _copy(segment, buffer, begin, found)
                begin += found
        finally:
            buffers.put(buffer)
        if digest is not None and digest.hexdigest() != expected:
            raise differs(self.path)

    def _digest(self, chunk: int) -> tuple[Any, str]:
        if self._entry is None:
            return None, ""
        if "sha256" in self._entry:
            return hashlib.sha256(), self._entry["sha256"]
        return xxhash.xxh3_128(), self._entry["xxh3_128"][chunk]

    def _read_at(self, buffer: Tensor, offset: int, wanted: int) -> int:
        """Fill the beginning of a buffer; returns the number of bytes, at most `wanted`."""
        padded = bytes_of(buffer[: min(buffer.nbytes, -(-wanted // BLOCK_BYTES) * BLOCK_BYTES)])
        try:
            try:
                found = os.preadv(self._descriptor, [padded], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                use_page_cache(self._descriptor)  # its blocks are larger, or a read ended inside of one
                found = os.preadv(self._descriptor, [padded], offset)
        except OSError as error:
            fact = f"{self.path.name} cannot be read: {error.strerror}"
            raise DamagedCheckpoint(fact, where=str(self.path.parent)) from None
        if not found:
            raise differs(self.path)
        return min(found, wanted)


def _copy(segment: Segment, buffer: Tensor, offset: int, num_bytes: int) -> None:
    """Copy the bytes of a segment that a buffer has: `num_bytes` of the file from `offset` on."""
    begin, end = max(segment.begin, offset), min(segment.end, offset + num_bytes)
    if begin < end:
        assert segment.target.nbytes == segment.end - segment.begin
        # Not `copy_`: it would start threads of its own.
        target, source = segment.target.data_ptr(), buffer.data_ptr()
        ctypes.memmove(target + begin - segment.begin, source + begin - offset, end - begin)


def is_intact(path: Path, entry: Mapping[str, Any], *, is_direct: bool = False) -> bool:
    """Whether a file is the one of the manifest; reads all of it, with `is_direct` past the page cache."""
    buffers = read_buffers()
    try:
        require_size(path, entry)
        with (
            ChunkedFile(path, entry, is_direct=is_direct) as file,
            ThreadPoolExecutor(NUM_THREADS, "verify") as threads,
        ):
            list(threads.map(lambda chunk: file.read(chunk, (), buffers), file.chunks(0, entry["bytes"])))
    except (CheckpointError, OSError):
        return False
    return True
