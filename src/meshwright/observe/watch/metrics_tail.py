"""Follows a metrics.jsonl: a long file from its index, or roughly at once and exactly soon after; then each
new line."""

import os
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.files import regular_file
from meshwright.observe.history import json_rows
from meshwright.observe.metrics import METRICS_NAME
from meshwright.observe.metrics_index import INDEXED, read_index
from meshwright.observe.watch.columns import Columns

_BLOCK_BYTES = 1 << 20
# A file above this is first shown by lines from places at equal distances.
_LONG_BYTES = 24 << 20
_NUM_PLACES = 600
_PLACE_BYTES = 2048


class MetricsTail:
    """The rows of one metrics.jsonl. One thread calls `read`; `columns` is replaced, never emptied."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_NAME
        self.generation = 0
        """Increases when rows that were given before may have changed."""
        self._reset(None)
        self.columns = Columns(INDEXED)

    def _reset(self, inode: int | None) -> None:
        self._inode, self._offset, self._rest = inode, 0, b""
        self._size = 0
        self._reading = Columns(INDEXED)
        self.is_complete = False

    @property
    def progress(self) -> float:
        """Share of the file that was read."""
        return 1.0 if self.is_complete or not self._size else self._offset / self._size

    def read(self) -> bool:
        """Read the next block; whether there was something new. A replaced file is read from its begin."""
        try:
            with regular_file(self._path) as file:
                return self._read(file)
        except OSError:
            return False

    def _read(self, file: BinaryIO) -> bool:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._reset(status.st_ino)
        self._size = status.st_size
        if self._offset == 0 and self._size > _LONG_BYTES and not self._read_indexed():
            self._show_roughly(file)
        file.seek(self._offset)
        block = file.read(_BLOCK_BYTES)
        self._offset += len(block)
        complete, newline, self._rest = (self._rest + block).rpartition(b"\n")
        self._rest = self._rest[:_BLOCK_BYTES]  # no line of ours is so long: the file is damaged
        rows = json_rows(complete) if newline else []
        last = int(self._reading.steps[-1]) if len(self._reading) else -1
        if rows and rows[0]["step"] <= last:
            self.generation += 1
        self._reading.append(rows)
        if self._offset >= self._size and not self.is_complete:
            self.is_complete = True
            self.columns, self.generation = self._reading, self.generation + 1
            return True
        return bool(rows)

    def _read_indexed(self) -> bool:
        """Take the rows from metrics.index, where it belongs to the file; the lines after them are read."""
        found = read_index(self._path)
        if found is not None:
            self._reading.take(found.steps, found.values)
            self._offset = found.end
        return found is not None

    def _show_roughly(self, file: BinaryIO) -> None:
        """One row from each of some hundred places of the file."""
        columns = Columns(INDEXED)
        rows: dict[int, dict[str, Any]] = {}
        for place in range(_NUM_PLACES):
            file.seek(self._size * place // _NUM_PLACES)
            lines = file.read(_PLACE_BYTES).split(b"\n")[1:-1]
            rows |= {row["step"]: row for row in json_rows(b"\n".join(lines[:1]))}
        columns.append([rows[step] for step in sorted(rows)])
        self.columns, self.generation = columns, self.generation + 1
