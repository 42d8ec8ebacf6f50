"""The memory of host tensors as bytes, and files that are read and written past the page cache (O_DIRECT)."""

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import torch
from torch import Tensor

BLOCK_BYTES = 4096
"""Offsets, sizes and addresses of O_DIRECT are multiples of this."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied; valid while the tensor lives.

    Not by `numpy()`: torch refuses to resize a storage that numpy has seen, and offload resizes storages.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def aligned_buffer(num_bytes: int) -> Tensor:
    """Host memory whose address O_DIRECT accepts."""
    buffer = torch.zeros(num_bytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    begin = -buffer.data_ptr() % BLOCK_BYTES
    return buffer[begin : begin + num_bytes]


def open_direct(path: Path, flags: int) -> int:
    """The descriptor of a file, opened with O_DIRECT where the file system allows it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)  # some file systems create the file before they refuse the flag
    return os.open(path, flags, 0o666)


def use_page_cache(descriptor: int) -> None:
    """Turn O_DIRECT off for an open file."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
