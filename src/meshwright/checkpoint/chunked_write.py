"""Writes a large file in chunks: one thread fills and hashes a chunk while another writes one.

Chunks go past the page cache (O_DIRECT) where the file system allows it. That saves a copy of all bytes, and
the disk is busy from the first chunk on rather than from the flush at the end.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from meshwright.checkpoint.digest import CHUNK_BYTES, digest_of
from meshwright.checkpoint.host_bytes import bytes_of

_NUM_THREADS = 2
_BLOCK_BYTES = 4096
"""Offsets, sizes and addresses of O_DIRECT are multiples of this."""

Fill = Callable[[Tensor, int], None]
"""Fills a tensor of bytes with those of the file from an offset on."""


def write_chunks(path: Path, num_bytes: int, fill: Fill) -> list[str]:
    """Write a new file and flush it to the disk; returns the digests of its chunks."""
    starts = range(0, num_bytes, CHUNK_BYTES)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(min(_NUM_THREADS, len(starts))):
        buffers.put(_aligned_buffer(min(CHUNK_BYTES, _padded(num_bytes))))
    descriptor = _open(path)

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
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _aligned_buffer(num_bytes: int) -> Tensor:
    buffer = torch.zeros(num_bytes + _BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    begin = -buffer.data_ptr() % _BLOCK_BYTES
    return buffer[begin : begin + num_bytes]


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse the flag
    return os.open(path, flags, 0o666)


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
            _use_page_cache(descriptor)


def _use_page_cache(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
