"""Parquet files: a record is a row, and a row group is read and kept as a block.

Of files in an object store, the footer and the row groups that are asked for are read, and nothing else.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.arrow_rows import row_of
from meshwright.data.readers.byte_files import ByteStream
from meshwright.data.readers.extras import package
from meshwright.data.readers.file_list import FileList, files_with
from meshwright.data.readers.object_store import StoreOptions
from meshwright.data.readers.places import RemotePlace
from meshwright.data.records import KEY, Record, RecordError
from meshwright.errors import DataError

SUFFIX = ".parquet"
# Decoded row groups that stay in memory. Shuffle by blocks, so that a row group serves many records.
_MAX_KEPT_BYTES = 256 << 20


class ParquetRows:
    """The rows of parquet files. A row group is decoded at once, so neighbours are cheap."""

    def __init__(self, path: Path | str | RemotePlace, *, columns: tuple[str, ...] | None = None) -> None:
        self._place = path if isinstance(path, RemotePlace) else None
        self.name, self._columns = path.name if isinstance(path, RemotePlace) else str(path), columns
        paths = _objects(path) if isinstance(path, RemotePlace) else files_with(Path(path), SUFFIX)
        groups = [_group_rows(self._stream(each), each) for each in paths]
        self._group_starts = [[0, *accumulate(rows)] for rows in groups]
        self._list = FileList(paths, [sum(rows) for rows in groups], place=self._place)
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """A hash of samples of the files."""
        return self._list.fingerprint

    @property
    def block_starts(self) -> NDArray[np.int64]:
        """The first row of each row group, for a shuffle by blocks."""
        file_starts = [0, *accumulate(self._list.counts)]
        starts = [
            first + at
            for first, groups in zip(file_starts, self._group_starts, strict=False)
            for at in groups[:-1]
        ]
        return np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._list)

    def record(self, index: int) -> Record:
        """The row at `index`; its key is the index where the file has no column `__key__`."""
        file, row = self._list.find(index)
        starts = self._group_starts[file]
        group = bisect_right(starts, row) - 1
        return {KEY: str(index), **row_of(self._table(file, group), row - starts[group])}

    def lengths(self) -> None:
        """None: the size of a row is not known without reading it."""
        return

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened."""
        self._list.require_unchanged()

    def _table(self, file: int, group: int) -> Any:
        with self._lock:
            table = self._kept.get((file, group))
            if table is None:
                table = self._kept[file, group] = self._read(file, group)
                while (
                    len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _MAX_KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
            self._kept.move_to_end((file, group))
            return table

    def _read(self, file: int, group: int) -> Any:
        parquet = package("pyarrow.parquet", extra="parquet", needed_for="parquet files")
        path = self._list.paths[file]
        try:
            with parquet.ParquetFile(self._stream(path)) as opened:
                return opened.read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()
        except (OSError, ValueError) as error:
            fact = f"row group {group} cannot be read: {str(error).splitlines()[0]}"
            raise RecordError(fact, file=str(path), hint="write the file again") from None

    def _stream(self, path: Path) -> Any:
        """What pyarrow reads: the path of a file, or an object as a stream."""
        return path if self._place is None else ByteStream(self._place.open(str(path)))

    def __reduce__(self) -> tuple[object, ...]:
        options = None if self._place is None else self._place.store.options
        return _reopened, (self.name, self._columns, options)


def _objects(place: RemotePlace) -> list[Path]:
    return [Path(name) for name in place.store.below(place.name) if name.endswith(SUFFIX)]


def _group_rows(stream: Any, path: Path) -> list[int]:
    parquet = package("pyarrow.parquet", extra="parquet", needed_for="parquet files")
    try:
        metadata = parquet.ParquetFile(stream).metadata
    except (OSError, ValueError) as error:
        fact = f"the file is no complete parquet file: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path), hint="write the file again") from None
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _reopened(name: str, columns: tuple[str, ...] | None, options: StoreOptions | None) -> ParquetRows:
    return ParquetRows(name if options is None else RemotePlace(name, options), columns=columns)
