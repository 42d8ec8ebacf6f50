"""HDF5 files: arrays of equal first dimension are the fields, and their rows are the records."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.extras import package
from meshwright.data.readers.file_list import FileList, files_with
from meshwright.data.records import KEY, Field, Record, RecordError
from meshwright.errors import DataError

SUFFIXES = (".h5", ".hdf5")


class Hdf5Rows:
    """Row i of every array in the files. Links to other files are not followed."""

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        paths = files_with(Path(path), *SUFFIXES)
        self._opened_by, self._open = 0, {}
        shapes = [_arrays(_opened(each), each) for each in paths]
        self._fields = [sorted(each) for each in shapes]
        if any(fields != self._fields[0] for fields in self._fields):
            raise DataError("the files have different arrays", where=self.name)
        self._list = FileList(
            paths, [_num_rows(each, where) for each, where in zip(shapes, paths, strict=True)]
        )

    @property
    def fingerprint(self) -> str:
        """A hash of samples of the files."""
        return self._list.fingerprint

    def __len__(self) -> int:
        return len(self._list)

    def record(self, index: int) -> Record:
        """Row `index` of every array."""
        file, row = self._list.find(index)
        path = self._list.paths[file]
        opened = self._file(path)
        record: dict[str, Field] = {KEY: str(index)}
        for name in self._fields[0]:
            try:
                array = opened[name]
                record[name.replace("/", ".")] = _field(array[row], is_variable=array.dtype.kind == "O")
            except (OSError, KeyError) as error:
                fact = f"row {row} of {name} cannot be read: {str(error).splitlines()[0]}"
                raise RecordError(fact, file=str(path), key=str(index)) from None
        return record

    def lengths(self) -> NDArray[np.int64] | None:
        """None: rows of an array have one size."""
        return None

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened."""
        self._list.require_unchanged()

    def _file(self, path: Path) -> Any:
        # The library must not be used by a process that inherited open files.
        if self._opened_by != os.getpid():
            self._open, self._opened_by = {}, os.getpid()
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]

    def __reduce__(self) -> tuple[object, ...]:
        return Hdf5Rows, (self.name,)


def _opened(path: Path) -> Any:
    h5py = package("h5py", extra="hdf5", needed_for="HDF5 files")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        fact = f"the file is no complete HDF5 file: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path), hint="write the file again") from None


def _arrays(opened: Any, path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each array that has rows; groups are searched, links to elsewhere are not."""
    h5py = package("h5py", extra="hdf5", needed_for="HDF5 files")
    found: dict[str, tuple[int, ...]] = {}

    def visit(group: Any, prefix: str) -> None:
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            item = group[name]
            if isinstance(item, h5py.Group):
                visit(item, f"{prefix}{name}/")
            elif item.shape and not item.is_virtual and not item.external:
                found[prefix + name] = item.shape

    visit(opened, "")
    if not found:
        raise DataError("the file has no array with rows", where=str(path))
    return found


def _num_rows(shapes: dict[str, tuple[int, ...]], path: Path) -> int:
    counts = {shape[0] for shape in shapes.values()}
    if len(counts) > 1:
        facts = ", ".join(f"{name} {shape[0]}" for name, shape in shapes.items())
        hint = "each array needs one row per record"
        raise DataError(f"the arrays have different numbers of rows: {facts}", where=str(path), hint=hint)
    return counts.pop()


def _field(value: Any, *, is_variable: bool) -> Field:
    if isinstance(value, (bytes, str)):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "O":
        raise KeyError("values of this type are not read")
    if array.dtype.kind == "V":
        return array.tobytes()
    if array.ndim == 0:
        return array.item()
    # Rows of uint8 of variable length are encoded images and the like.
    return array.tobytes() if is_variable and array.dtype == np.uint8 else array
