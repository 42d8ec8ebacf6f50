"""One file of tensors in the safetensors format, written in one pass together with its digests.

A file is 8 bytes with the length of its header, the header (JSON: name -> dtype, shape, byte range), then the
bytes of all tensors. The format is written here rather than by the safetensors package, because that needs
all tensors in host memory at once and a second pass over the file for the digests. Nothing in such a file is
ever executed.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.chunked_write import write_chunks
from meshwright.checkpoint.digest import file_entry
from meshwright.memory.offload.host import synchronize

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


def write_shard_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write local tensors and flush them to the disk; returns the file's entry in the manifest."""
    for device in {tensor.device for tensor in tensors.values()}:
        synchronize(device)  # the threads that write do not know the stream that computes
    # Largest elements first, so that every tensor is aligned for a memory map.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    parts = _FileParts(_header(ordered), list(ordered.values()))
    return file_entry(parts.num_bytes, write_chunks(path, parts.num_bytes, parts.fill))


class _FileParts:
    """The bytes of a shard file: its header, then its tensors, which are copied chunk by chunk."""

    def __init__(self, header: bytes, tensors: Sequence[Tensor]) -> None:
        self._parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors]
        self._starts = list(accumulate((part.nbytes for part in self._parts), initial=0))
        self.num_bytes = self._starts.pop()
        # Two threads fill neighbouring chunks. A tensor with gaps is made contiguous once for both of them.
        self._flat = lru_cache(maxsize=2)(self._flat_bytes)

    def fill(self, target: Tensor, begin: int) -> None:
        """Copy the bytes of the file from an offset on."""
        done, number = 0, bisect_right(self._starts, begin) - 1
        while done < target.nbytes:
            source, inside = self._flat(number), begin + done - self._starts[number]
            size = min(target.nbytes - done, source.nbytes - inside)
            target[done : done + size].copy_(source[inside : inside + size])
            done, number = done + size, number + 1

    def _flat_bytes(self, number: int) -> Tensor:
        return self._parts[number].detach().reshape(-1).view(torch.uint8)


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
