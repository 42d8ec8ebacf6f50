"""Parquet files: a record is a row, and a row group is read and kept as a block."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.arrow_rows import row_of
from meshwright.data.readers.extras import package
from meshwright.data.readers.file_list import FileList, files_with
from meshwright.data.records import KEY, Record, RecordError
from meshwright.errors import DataError

SUFFIX = ".parquet"
# Decoded row groups that stay in memory. Shuffle by blocks, so that a row group serves many records.
_MAX_KEPT_BYTES = 256 << 20


class ParquetRows:
    """The rows of parquet files. A row group is decoded at once, so neighbours are cheap."""

    def __init__(self, path: Path | str, *, columns: tuple[str, ...] | None = None) -> None:
        self.name, self._columns = str(path), columns
        paths = files_with(Path(path), SUFFIX)
        groups = [_group_rows(each) for each in paths]
        self._group_starts = [[0, *accumulate(rows)] for rows in groups]
        self._list = FileList(paths, [sum(rows) for rows in groups])
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
            with parquet.ParquetFile(path) as opened:
                return opened.read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()
        except (OSError, ValueError) as error:
            fact = f"row group {group} cannot be read: {str(error).splitlines()[0]}"
            raise RecordError(fact, file=str(path), hint="write the file again") from None

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.name, self._columns)


def _group_rows(path: Path) -> list[int]:
    parquet = package("pyarrow.parquet", extra="parquet", needed_for="parquet files")
    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ValueError) as error:
        fact = f"the file is no complete parquet file: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path), hint="write the file again") from None
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _reopened(name: str, columns: tuple[str, ...] | None) -> ParquetRows:
    return ParquetRows(name, columns=columns)
