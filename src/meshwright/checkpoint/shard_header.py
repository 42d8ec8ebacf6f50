"""The header of a shard file: dtype, shape and byte range of its tensors, checked before they are used."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.shard_file import DTYPE_NAMES
from meshwright.files import regular_file

_LENGTH_BYTES = 8
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor is in a shard file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardHeader:
    """The tensors of one shard file."""

    def __init__(self, path: Path) -> None:
        """Read the header; ValueError where it is not one."""
        with regular_file(path) as stream:
            self._file_bytes = path.stat().st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            self.end = _LENGTH_BYTES + length
            """Where the header ends and the data begins."""
            if self.end > self._file_bytes:
                raise ValueError("its header is longer than the file")
            self._entries = json.loads(stream.read(length))
        if not isinstance(self._entries, dict):
            raise ValueError("its header is no JSON object")

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is; KeyError, TypeError or ValueError where its entry is missing or damaged."""
        entry = self._entries[name]
        dtype, shape = _DTYPES[entry["dtype"]], _sizes(entry["shape"])
        begin, end = (self.end + offset for offset in _sizes(entry["data_offsets"]))
        if end > self._file_bytes or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its bytes {begin} to {end} are not those of a {entry['dtype']} {list(shape)}")
        return StoredTensor(dtype, shape, begin, end)


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < 2**62 for size in found):
        raise ValueError(f"{found!r} are no sizes")
    return tuple(found)
