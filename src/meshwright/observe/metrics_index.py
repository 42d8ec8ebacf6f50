"""metrics.index: the watched columns of metrics.jsonl as numbers, written by the run beside it.

A million lines of JSON take seconds to parse; the same rows as binary numbers take a tenth of one. The index
repeats what metrics.jsonl has and may be deleted: who reads it checks that it belongs to the file, and reads
the lines otherwise. A row is the offset at which its line ends, the step, and one float32 per column: NaN
where the line has no value, infinite where the value is not finite.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.files import regular_file
from meshwright.observe.json_lines import row_of_step

INDEX_NAME = "metrics.index"
INDEXED = (
    *("loss", "eval_loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second"),
    *("tflops_per_gpu", "mfu", "peak_bytes", "data_wait_seconds", "reduce_wait_seconds", "loss_scale"),
    *("aux_loss", "expert_load_max", "expert_load_min", "noise_scale_tokens"),
)
"""The columns of the index: those that are watched."""
_HEADER = json.dumps({"version": 1, "columns": INDEXED}).encode().ljust(511) + b"\n"
_PACK = struct.Struct(f"<qq{len(INDEXED)}f")
_LARGEST = float(np.finfo(np.float32).max)
_ROW = np.dtype([("end", "<i8"), ("step", "<i8"), ("values", "<f4", len(INDEXED))])
_NUM_CHECKED = 16
_LONGEST_LINE = 16384


class IndexWriter:
    """Appends a row for each line of metrics.jsonl; rank 0 only."""

    def __init__(self, metrics: Path) -> None:
        """Open the index of a metrics.jsonl that was just opened: rows of lines that it no longer has are
        removed, and an index that does not reach its end is written again."""
        self._path = metrics.with_name(INDEX_NAME)
        self._end = metrics.stat().st_size
        rows = _rows_of(self._path)
        kept = int(np.searchsorted(rows["end"], self._end, side="right"))
        is_complete = (int(rows["end"][kept - 1]) if kept else 0) == self._end
        if is_complete and len(rows):
            os.truncate(self._path, len(_HEADER) + kept * _ROW.itemsize)
            self._file: BinaryIO = self._path.open("ab", buffering=0)
            return
        self._file = self._path.open("wb", buffering=0)
        self._file.write(_HEADER)
        for end, row in _lines(metrics):
            self._file.write(_packed(end, row))

    def append(self, num_bytes: int, values: Mapping[str, Any]) -> None:
        """Append the row of a line of so many bytes."""
        self._end += num_bytes
        self._file.write(_packed(self._end, values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _packed(end: int, values: Mapping[str, Any]) -> bytes:
    return _PACK.pack(end, values["step"], *(_number(values.get(name)) for name in INDEXED))


def _number(value: Any) -> float:
    """NaN for no value; infinite for one that is not finite, or beyond float32."""
    if value is None:
        return math.nan
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _LARGEST
    return float(value) if is_number else math.inf


def _lines(metrics: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset of its end, values) of each well-formed line."""
    end = 0
    with metrics.open("rb") as file:
        for line in file:
            end += len(line)
            row = row_of_step(line)
            if row is not None:
                yield end, row


def _rows_of(path: Path) -> NDArray[Any]:
    """The complete rows of an index; none where it is absent, unreadable or of another version."""
    try:
        with regular_file(path) as file:
            if file.read(len(_HEADER)) != _HEADER:
                return np.empty(0, _ROW)
            content = np.fromfile(file, np.uint8)
    except OSError:
        return np.empty(0, _ROW)
    return content[: len(content) // _ROW.itemsize * _ROW.itemsize].view(_ROW)


class IndexedRows(NamedTuple):
    """Rows of metrics.jsonl up to an offset."""

    steps: NDArray[np.int64]
    values: dict[str, NDArray[np.float32]]
    """Columns that have a value."""
    end: int


def read_index(metrics: Path) -> IndexedRows | None:
    """The rows of an index that belongs to a metrics.jsonl; None where there is none, or it does not."""
    rows = _rows_of(metrics.with_name(INDEX_NAME))
    if not len(rows) or not _belongs(rows, metrics):
        return None
    columns = {name: np.ascontiguousarray(rows["values"][:, at]) for at, name in enumerate(INDEXED)}
    kept = {name: values for name, values in columns.items() if not np.isnan(values).all()}
    return IndexedRows(rows["step"].astype(np.int64), kept, int(rows["end"][-1]))


def _belongs(rows: NDArray[Any], metrics: Path) -> bool:
    """Whether steps and offsets ascend, and some rows are those of the lines that end at their offsets."""
    if (np.diff(rows["step"]) <= 0).any() or (np.diff(rows["end"]) <= 0).any():
        return False
    try:
        with regular_file(metrics) as file:
            size = os.fstat(file.fileno()).st_size
            chosen = np.unique(np.linspace(0, len(rows) - 1, _NUM_CHECKED).astype(int))
            return int(rows["end"][-1]) <= size and all(_is_line(file, rows, int(at)) for at in chosen)
    except OSError:
        return False


def _is_line(file: BinaryIO, rows: NDArray[Any], at: int) -> bool:
    end = int(rows["end"][at])
    begin = int(rows["end"][at - 1]) if at else 0
    if not begin < end <= begin + _LONGEST_LINE:
        return False
    file.seek(begin)
    line = file.read(end - begin)
    row = row_of_step(line) if line.endswith(b"\n") else None
    return row is not None and _packed(end, row) == rows[at].tobytes()
