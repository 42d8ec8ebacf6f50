"""Writes a large file in chunks: one thread fills and hashes a chunk while another writes one.

Chunks go past the page cache (O_DIRECT) where the file system allows it. That saves a copy of all bytes, and
the disk is busy from the first chunk on rather than from the flush at the end.
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from meshwright.checkpoint.digest import CHUNK_BYTES, digest_of
from meshwright.checkpoint.host_bytes import (
    BLOCK_BYTES,
    aligned_buffer,
    bytes_of,
    open_direct,
    use_page_cache,
)

_NUM_THREADS = 2

Fill = Callable[[Tensor, int], None]
"""Fills a tensor of bytes with those of the file from an offset on."""


def write_chunks(path: Path, num_bytes: int, fill: Fill) -> list[str]:
    """Write a new file and flush it to the disk; returns the digests of its chunks."""
    starts = range(0, num_bytes, CHUNK_BYTES)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(min(_NUM_THREADS, len(starts))):
        buffers.put(aligned_buffer(min(CHUNK_BYTES, _padded(num_bytes))))
    descriptor = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(start: int) -> str:
        buffer = buffers.get()
        try:
            used = min(CHUNK_BYTES, num_bytes - start)
            fill(buffer[:used], start)
            digest = digest_of(bytes_of(buffer[:used]))
            _write_at(descriptor, bytes_of(buffer[: _padded(used)]), start)
            return digest
        finally:
            buffers.put(buffer)

    try:
        with ThreadPoolExecutor(_NUM_THREADS, "write") as threads:
            digests = list(threads.map(write, starts))
        os.ftruncate(descriptor, num_bytes)  # without the padding of the last block
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digests


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all bytes at an offset: one call may write fewer."""
    done, is_refused = 0, False
    while done < len(content):
        try:
            done += os.pwrite(descriptor, content[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or is_refused:
                raise
            is_refused = True  # its blocks are larger, or a write ended inside of one
            use_page_cache(descriptor)
