"""The header of a safetensors file: dtype, shape and byte range of its tensors, checked before they are used.

It is 8 bytes of length and a JSON object, so it is read without torch.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

from meshwright.files import regular_file

_LENGTH_BYTES = 8
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


class TensorRange(NamedTuple):
    """Where a tensor is in a file."""

    dtype: str
    """Its name in the file, such as BF16."""
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """Names, dtypes and shapes of the tensors of one file; no tensor is read."""

    def __init__(self, path: Path) -> None:
        """Read the header; ValueError where it is not one, OSError where the file cannot be read."""
        with regular_file(path) as stream:
            self._file_bytes = path.stat().st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            self.end = _LENGTH_BYTES + length
            """Where the header ends and the data begins."""
            if self.end > self._file_bytes:
                raise ValueError("its header is longer than the file")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes, and safetensors reads {_MAX_HEADER_BYTES}")
            self._entries: dict[str, Any] = json.loads(stream.read(length))
        if not isinstance(self._entries, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  read
            raise ValueError("its header is no JSON object")

    def names(self) -> list[str]:
        """The names of all tensors."""
        return [name for name in self._entries if name != _METADATA]

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer noted beside the tensors."""
        found = self._entries.get(_METADATA)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def tensor(self, name: str) -> TensorRange:
        """Where a tensor is; KeyError, TypeError or ValueError where its entry is missing or damaged."""
        entry = self._entries[name]
        dtype, shape = entry["dtype"], _sizes(entry["shape"])
        begin, end = (self.end + offset for offset in _sizes(entry["data_offsets"]))
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"{name} has the unknown dtype {dtype}")
        if end > self._file_bytes:
            raise ValueError(f"the file ends at byte {self._file_bytes}, and a tensor at {end}")
        if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise ValueError(f"its bytes {begin} to {end} are not those of a {dtype} {list(shape)}")
        return TensorRange(dtype, shape, begin, end)


def _sizes(found: Any) -> tuple[int, ...]:
    sizes: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [None]
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError(f"{found!r} are no sizes")
    return tuple(sizes)
