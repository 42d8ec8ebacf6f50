"""index.json: which box of which tensor is in which shard file. Plain JSON, checked before it is used.

    {"format": 1, "tensors": {"model.head.weight": {"dtype": "F32", "shape": [512, 64],
        "boxes": [{"file": "shard-00000.safetensors", "start": [0, 0], "shape": [256, 64]}, ...]}}}

The boxes of a tensor do not overlap and fill its shape.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.json_file import read_json
from meshwright.errors import CheckpointError

INDEX = "index.json"
INDEX_FORMAT = 1
_FILE_NAME = re.compile(r"shard-\d{5,}\.safetensors")
_MAX_INDEX_BYTES = 2**30


@dataclass(frozen=True)
class Box:
    """A contiguous part of a tensor, and the file that has it under the tensor's name."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, wanted: tuple[slice, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The slices of this box and of the wanted one that are the same elements; None where none are."""
        ours: list[slice] = []
        theirs: list[slice] = []
        for start, size, want in zip(self.start, self.shape, wanted, strict=True):
            begin, end = max(start, want.start), min(start + size, want.stop)
            if begin >= end:
                return None
            ours.append(slice(begin - start, end - start))
            theirs.append(slice(begin - want.start, end - want.start))
        return tuple(ours), tuple(theirs)


@dataclass(frozen=True)
class IndexEntry:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def shard_file_name(rank: int) -> str:
    """The file that one rank writes."""
    return f"shard-{rank:05d}.safetensors"


def dump_index(entries: Mapping[str, IndexEntry]) -> str:
    """The text of index.json."""
    tensors = {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "boxes": [{"file": box.file, "start": box.start, "shape": box.shape} for box in entry.boxes],
        }
        for name, entry in sorted(entries.items())
    }
    return json.dumps({"format": INDEX_FORMAT, "tensors": tensors})


def read_index(folder: Path) -> dict[str, IndexEntry]:
    """The tensors of a checkpoint, by name; CheckpointError where the index is not one of ours."""
    path = folder / INDEX
    found = read_json(path, max_bytes=_MAX_INDEX_BYTES)
    try:
        if found["format"] != INDEX_FORMAT:
            raise ValueError(f"format {found['format']!r} is not known")
        return {str(name): _entry(entry) for name, entry in found["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the list of tensors is damaged: {type(error).__name__}: {error}",
            where=str(path),
            hint="use an older checkpoint",
        ) from None


def _entry(found: dict[str, Any]) -> IndexEntry:
    shape = _sizes(found["shape"])
    boxes = tuple(_box(box, shape) for box in found["boxes"])
    if sum(math.prod(box.shape) for box in boxes) != math.prod(shape):
        raise ValueError(f"the boxes do not fill the shape {list(shape)}")
    return IndexEntry(str(found["dtype"]), shape, boxes)


def _box(found: dict[str, Any], full: tuple[int, ...]) -> Box:
    file, start, shape = found["file"], _sizes(found["start"]), _sizes(found["shape"])
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a shard file")
    ends = [begin + size for begin, size in zip(start, shape, strict=True)]
    if any(end > size for end, size in zip(ends, full, strict=True)):
        raise ValueError(f"a box at {list(start)} of {list(shape)} is outside of {list(full)}")
    return Box(file, start, shape)


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < 2**62 for size in found):
        raise ValueError(f"{found!r} is not a shape")
    return tuple(found)
