"""Files of one JSON object per line, with random access through an index of the lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.byte_files import LocalFile
from meshwright.data.readers.file_list import FileList, files_with
from meshwright.data.records import KEY, Field, Record, RecordError
from meshwright.errors import DataError
from meshwright.units import show_bytes

SUFFIX, INDEX_SUFFIX = ".jsonl", ".jsonl.idx"
# A file of this size is indexed at the start in about a second; a larger one needs `data index`.
_MAX_INDEXED_AT_START = 1 << 30
_CHUNK_BYTES = 1 << 24


class JsonLines:
    """The lines of `.jsonl` files. Numbers and texts are fields; lists of numbers are arrays.

    A value that is nested (an object, a list of texts) is a field with its JSON text. null is no field.
    """

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        paths = files_with(Path(path), SUFFIX)
        self._files = [LocalFile(each) for each in paths]
        self._offsets = [_offsets_of(each) for each in paths]
        self._list = FileList(paths, [len(offsets) - 1 for offsets in self._offsets])

    @property
    def fingerprint(self) -> str:
        """A hash of samples of the files."""
        return self._list.fingerprint

    def __len__(self) -> int:
        return len(self._list)

    def record(self, index: int) -> Record:
        """The object in a line; RecordError where it is no JSON object."""
        file, line = self._list.find(index)
        start, end = (int(at) for at in self._offsets[file][line : line + 2])
        content = self._files[file].read_at(start, end - start)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"the line is not JSON ({error})", file, line) from None
        if not isinstance(value, dict):
            raise self._broken(f"the line is a JSON {type(value).__name__}, not an object", file, line)
        return {KEY: str(index)} | {name: field(each) for name, each in value.items() if each is not None}

    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each line."""
        return np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened."""
        self._list.require_unchanged()

    def _broken(self, fact: str, file: int, line: int) -> RecordError:
        offset = int(self._offsets[file][line])
        number = 1 + self._files[file].read_at(0, offset).count(b"\n")
        name = f"{self._files[file].name}:{number}"
        return RecordError(fact, file=name, offset=offset, hint="each line is one JSON object")

    def __reduce__(self) -> tuple[object, ...]:
        return JsonLines, (self.name,)


def field(value: Any) -> Field:
    """A JSON value as the field of a record."""
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        return np.array(value)
    return json.dumps(value, ensure_ascii=False)


def line_offsets(path: Path) -> NDArray[np.int64]:
    """Where each line that is not blank begins, and the size of the file; one pass over the file."""
    file = LocalFile(path)
    starts = [np.zeros(1, dtype=np.int64)]
    for at in range(0, file.num_bytes, _CHUNK_BYTES):
        chunk = np.frombuffer(file.read_at(at, min(_CHUNK_BYTES, file.num_bytes - at)), dtype=np.uint8)
        starts.append(np.flatnonzero(chunk == ord("\n")) + at + 1)
    offsets = np.append(np.concatenate(starts), file.num_bytes)
    offsets = offsets[: np.searchsorted(offsets, file.num_bytes) + 1]
    return _without_blank(file, offsets)


def write_line_index(path: Path) -> int:
    """Write the index of a file beside it, in the layout of tar indexes; returns the number of lines."""
    offsets = line_offsets(path)
    target = path.with_name(path.name + ".idx")
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(offsets.astype("<u8").tobytes())
    partial.replace(target)
    return len(offsets) - 1


def _without_blank(file: LocalFile, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Only lines of a few bytes can be blank in practice, so only those are read."""
    short = np.flatnonzero(np.diff(offsets) <= 64)
    blank = [
        index
        for index in short
        if not file.read_at(int(offsets[index]), int(offsets[index + 1] - offsets[index])).strip()
    ]
    return np.delete(offsets, blank)


def _offsets_of(path: Path) -> NDArray[np.int64]:
    index, size = path.with_name(path.name + ".idx"), path.stat().st_size
    if index.is_file() and index.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        offsets = np.fromfile(index, dtype="<u8").astype(np.int64)
        if len(offsets) and offsets[-1] == size and (np.diff(offsets) > 0).all():
            return offsets
    if size > _MAX_INDEXED_AT_START:
        fact = f"the file has {show_bytes(size)} and no current index of its lines"
        raise DataError(fact, where=str(path), hint="run `meshwright data index` on it once")
    return line_offsets(path)
