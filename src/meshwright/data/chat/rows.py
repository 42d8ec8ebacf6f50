"""Records of chats: .jsonl, .json and .parquet files, and Hugging Face datasets on disk, as streams.

A unit of work is a `Piece`: a range of bytes of a large .jsonl file, rows of an Arrow dataset, or a file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.readers.arrow import SPLITS_FILE, STATE_FILE, ArrowRows
from meshwright.data.readers.extras import package
from meshwright.data.text_input import JSON_LINES, PARQUET, TEXT, Line, Piece, find_files, json_lines, kind_of
from meshwright.errors import DataError, read_trouble
from meshwright.files import MIB, read_json_file

JSON = ".json"
_BATCH_ROWS = 256
_ROWS_OF_A_PIECE = 1 << 11
_MAX_JSON_BYTES = 1024 * MIB


class Row(NamedTuple):
    """One record."""

    record: Mapping[str, Any]
    where: str
    """File and line, or row; in a later piece of a file the line is counted from the piece on."""
    num_bytes: int
    """Bytes of the file for progress."""
    line: Line | None = None
    trouble: DataError | None = None
    """Why the record cannot be read, where that is so."""

    def located(self, error: DataError) -> DataError:
        """An error of this record with its line in the file, for which the lines before are counted."""
        if self.line is None or not self.line.piece.start:
            return error
        return DataError(
            error.fact, where=error.where.replace(self.where, self.line.where()), hint=error.hint
        )


@dataclass(frozen=True)
class ChatFiles:
    """The input of a packing job."""

    files: tuple[Path, ...]
    split: str | None = None
    """A split of a Hugging Face dataset."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(_bytes_of(file) for file in self.files)

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """Units of work, in order."""
        return [piece for file in self.files for piece in self._pieces_of(file, piece_bytes)]

    def bytes_of(self, piece: Piece) -> int:
        """Bytes of one unit, for progress."""
        if not piece.path.is_dir() or piece.end is None:
            return piece.num_bytes
        share = (piece.end - piece.start) / max(1, len(ArrowRows(piece.path, split=self.split)))
        return int(_bytes_of(piece.path) * share)

    def rows(self, piece: Piece) -> Iterator[Row]:
        """The records of one unit, in order; DataError where one cannot be read."""
        if piece.path.is_dir():
            return self._arrow_rows(piece)
        kind = kind_of(piece.path)
        if kind == JSON:
            return _json_rows(piece.path)
        return _parquet_rows(piece.path) if kind == PARQUET else _lines(piece)

    def _pieces_of(self, file: Path, piece_bytes: int) -> list[Piece]:
        size, step = file.stat().st_size, piece_bytes
        if file.is_dir():
            size, step = len(ArrowRows(file, split=self.split)), _ROWS_OF_A_PIECE
        elif file.suffix != JSON_LINES:
            return [Piece(file)]
        return [Piece(file, at, min(at + step, size)) for at in range(0, size, step)]

    def _arrow_rows(self, piece: Piece) -> Iterator[Row]:
        source = ArrowRows(piece.path, split=self.split)
        share = _bytes_of(piece.path) / max(1, len(source))
        for index in range(piece.start, len(source) if piece.end is None else piece.end):
            num_bytes = int((index + 1) * share) - int(index * share)
            yield Row(source.values(index), f"{piece.path}: row {index}", num_bytes)


def find_chats(paths: Sequence[Path], *, split: str | None) -> ChatFiles:
    """The files of chats at these paths: a folder is a Hugging Face dataset, or is searched for files."""
    found: list[Path] = []
    for path in paths:
        if _is_saved_dataset(path) or (path.is_file() and path.suffix == JSON):
            found.append(path)
        else:
            found += [file for file in find_files([path]) if kind_of(file) != TEXT]
    if not found:
        hint = "chats are records: .jsonl, .json, .parquet, or a folder that `save_to_disk` wrote"
        raise DataError("there are no records of chats here", where=", ".join(map(str, paths)), hint=hint)
    if split is not None and not any(map(_is_saved_dataset, found)):
        fact = "no Hugging Face dataset is packed, so a split has no effect"
        raise DataError(fact, where="--dataset-split", hint="leave it out")
    return ChatFiles(tuple(found), split)


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in (STATE_FILE, SPLITS_FILE))


def _bytes_of(path: Path) -> int:
    files = path.rglob("*.arrow") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _lines(piece: Piece) -> Iterator[Row]:
    for line in json_lines(piece):
        where = f"{piece.path}:{line.number}"
        try:
            record = json.loads(line.content)
        except (ValueError, RecursionError) as error:
            is_text = not isinstance(error, UnicodeDecodeError)
            hint = "each line is one JSON object" if is_text else "save the file as UTF-8"
            trouble = DataError(f"the line is not JSON ({error})", where=where, hint=hint)
            yield Row({}, where, len(line.content), line, trouble)
        else:
            yield _row(record, where, len(line.content), line)


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        value = read_json_file(path, max_bytes=_MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        hint = f"a .json file is one list of records; with one record per line its name ends in {JSON_LINES}"
        fact = f"the file cannot be read: {read_trouble(error)}"
        raise DataError(fact, where=str(path), hint=hint) from error
    if not isinstance(value, list):
        hint = "write one object per line into a .jsonl file"
        raise DataError("the file is no JSON list of records", where=str(path), hint=hint)
    share = path.stat().st_size / max(1, len(value))
    for index, record in enumerate(value):
        where = f"{path}: entry {index}"
        yield _row(record, where, int((index + 1) * share) - int(index * share))


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = package("pyarrow.parquet", extra="parquet", needed_for="parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            row, share = 0, path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                for record in batch.to_pylist():
                    yield Row(record, f"{path}: row {row}", int((row + 1) * share) - int(row * share))
                    row += 1
    except (OSError, ValueError) as error:
        fact = f"the file cannot be read: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path), hint="copy it again, or allow reading it") from error


def _row(record: Any, where: str, num_bytes: int, line: Line | None = None) -> Row:
    if isinstance(record, dict):
        return Row(record, where, num_bytes, line)
    fact = f"the record is a JSON {type(record).__name__}, not an object"
    trouble = DataError(fact, where=where, hint='write {"messages": [...]}, or another format of chats')
    return Row({}, where, num_bytes, line, trouble)
