"""One file of tensors in the safetensors format: written in one pass together with its hash, read by slices.

A file is 8 bytes with the length of its header, the header (JSON: name -> dtype, shape, byte range), then the
bytes of all tensors. The format is written here rather than by the safetensors package, because that needs
all tensors in host memory at once and a second pass over the file for the hash. Reading uses the package,
which checks the header. Nothing in such a file is ever executed.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_ALIGNMENT = 8
_WRITE_BYTES = 64 << 20


def write_shard_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write local tensors, one at a time, and flush them to the disk; returns the file's size and hash."""
    # Largest elements first, so that every tensor is aligned for a memory map.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(1, "hash") as hashing:
        header = _header(ordered)
        digest.update(header)
        num_bytes += _write(stream, memoryview(header))
        for tensor in ordered.values():
            on_host = tensor.detach().cpu().contiguous()  # a copy only where it is on a device or has gaps
            content = _bytes_of(on_host)
            hashed = hashing.submit(digest.update, content)  # beside the write: both release the GIL
            num_bytes += _write(stream, content)
            hashed.result()
        os.fsync(stream.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _write(stream: RawIOBase, content: memoryview) -> int:
    """Write all bytes: one call may write fewer."""
    done = 0
    while done < len(content):
        done += stream.write(content[done : done + _WRITE_BYTES]) or 0
    return done


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied; valid while the tensor lives.

    Not by `numpy()`: torch refuses to resize a storage that numpy has seen, and offload resizes storages.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


class ShardFiles:
    """Open shard files of one checkpoint, by name; close it after reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def read(self, file: str, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A box of one tensor of one file; only its rows are read from the disk."""
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            if not slices:
                return self._open[file].get_tensor(name)
            return self._open[file].get_slice(name)[slices]
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"tensor {name} cannot be read: {error}",
                where=str(self._folder / file),
                hint="use an older checkpoint: this one is damaged",
            ) from None

    def close(self) -> None:
        """Let go of all memory maps."""
        self._open.clear()
