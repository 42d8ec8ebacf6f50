"""Documents of text files: .txt, .jsonl and .parquet, and compressed ones, as streams."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from meshwright.data.readers.extras import package
from meshwright.errors import DataError, read_trouble
from meshwright.files import regular_file
from meshwright.units import show_bytes

SplitAt = Literal["file", "blank-line"]
TEXT, JSON_LINES, PARQUET = ".txt", ".jsonl", ".parquet"
COMPRESSED = (".gz", ".zst")
KINDS = (
    TEXT,
    JSON_LINES,
    PARQUET,
    *(f"{kind}{ending}" for kind in (TEXT, JSON_LINES) for ending in COMPRESSED),
)
# A document is tokenized at once, so memory holds several copies of one.
MAX_DOCUMENT_BYTES = 1 << 30
_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class TextFormat:
    """How text files are read."""

    split: SplitAt = "file"
    """.txt files: a document is a file, or the text between blank lines."""
    text_field: str = "text"
    """.jsonl and .parquet files: the key or column whose value is the document."""


class Document(NamedTuple):
    """One text."""

    text: str
    num_bytes: int
    """Bytes read from the file since the document before, for progress."""


class Piece(NamedTuple):
    """A file, or the lines of a .jsonl file that begin in a range of bytes."""

    path: Path
    start: int = 0
    end: int | None = None
    """None: up to the end of the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return (self.path.stat().st_size if self.end is None else self.end) - self.start


def kind_of(path: Path) -> str:
    """.txt, .jsonl or .parquet; the ending of compression is left out."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The text files at these paths, folders searched recursively, in the order of names."""
    return [file for path in paths for file in _files_at(path)]


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(KINDS) and file.is_file())
        if not found:
            kinds = f"{TEXT}, {JSON_LINES} or {PARQUET}"
            fact, hint = f"the folder holds no {kinds} file", "name the files themselves"
            raise DataError(fact, where=str(path), hint=hint)
        return found
    if path.exists() and not path.is_file():
        raise DataError("this is no regular file", where=str(path), hint="copy its content into a file first")
    if not path.exists():
        hint = "name files of text, .jsonl files, or folders of them"
        raise DataError("there is no such file or folder", where=str(path), hint=hint)
    if not path.name.endswith(KINDS):
        hint = f"rename it, or convert it to {JSON_LINES} with one JSON object per line"
        fact = f"the file is none of {TEXT}, {JSON_LINES}, {PARQUET}, nor compressed text (.gz, .zst)"
        raise DataError(fact, where=str(path), hint=hint)
    return [path]


def documents(pieces: Sequence[Piece], text_format: TextFormat) -> Iterator[Document]:
    """The documents of files in order; DataError with file and line at the first that cannot be read."""
    for piece in pieces:
        kind = kind_of(piece.path)
        if kind == PARQUET:
            yield from _parquet_rows(piece.path, text_format.text_field)
            continue
        with _stream(piece.path) as stream:
            if kind == JSON_LINES:
                yield from _json_lines(stream, piece, text_format.text_field)
            elif text_format.split == "blank-line":
                yield from _paragraphs(stream, piece.path)
            else:
                yield _file_document(stream, piece.path)


@contextmanager
def _stream(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed; DataError where it cannot be read or is damaged."""
    try:
        with regular_file(path) as file:
            yield _decompressed(file, path)
    except (OSError, EOFError, zlib.error) as error:
        fact = f"the file cannot be read: {read_trouble(error)}"
        raise DataError(fact, where=str(path), hint="copy it again, or allow reading it") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"the file cannot be decompressed: {error}", where=str(path)) from error


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file))  # pyright: ignore[reportArgumentType]
    if path.suffix == ".zst":
        zstandard = package("zstandard", extra="zstd", needed_for=".zst files")
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return io.BufferedReader(reader, buffer_size=1 << 20)
    return file


def _parquet_rows(path: Path, text_field: str) -> Iterator[Document]:
    parquet = package("pyarrow.parquet", extra="parquet", needed_for="parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                hint = f"the columns are {', '.join(file.schema_arrow.names[:8])}; name one with --field"
                raise DataError(f"the file has no column {text_field!r}", where=str(path), hint=hint)
            row, share = 0, path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field], use_threads=False):
                for value in batch.column(0).to_pylist():
                    num_bytes = int((row + 1) * share) - int(row * share)
                    yield Document(_valid(value, f"{path}: row {row}", text_field), num_bytes)
                    row += 1
    except (OSError, ValueError) as error:
        fact = f"the file cannot be read: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path)) from error


def _file_document(file: BinaryIO, path: Path) -> Document:
    content = file.read(MAX_DOCUMENT_BYTES + 1)
    _require_size(len(content), str(path))
    return Document(_decode(content, str(path)), len(content))


def _paragraphs(file: BinaryIO, path: Path) -> Iterator[Document]:
    lines: list[bytes] = []
    first_line = number = num_bytes = 0
    for number, line in enumerate(_lines(file, path), start=1):
        num_bytes += len(line)
        if line.strip():
            first_line = first_line if lines else number
            lines.append(line)
            _require_size(num_bytes, f"{path}:{first_line}")
        elif lines:
            yield Document(_decode(b"".join(lines), f"{path}:{first_line}"), num_bytes)
            lines, num_bytes = [], 0
    if lines:
        yield Document(_decode(b"".join(lines), f"{path}:{first_line}"), num_bytes)


class Line(NamedTuple):
    """One line of a .jsonl file that is not blank."""

    content: bytes
    piece: Piece
    number: int
    """Counted from 1 in its piece."""

    def where(self) -> str:
        """File and line; counts the lines before the piece."""
        return f"{self.piece.path}:{_lines_before(self.piece) + self.number}"


def json_lines(piece: Piece) -> Iterator[Line]:
    """The lines of a .jsonl file that begin in the piece, without blank ones."""
    with _stream(piece.path) as stream:
        yield from _lines_of(stream, piece)


def _lines_of(file: BinaryIO, piece: Piece) -> Iterator[Line]:
    at = _first_line(file, piece.start)
    for number, line in enumerate(_lines(file, piece.path), start=1):
        if piece.end is not None and at >= piece.end:
            return
        at += len(line)
        if line.strip():
            yield Line(line, piece, number)


def _json_lines(file: BinaryIO, piece: Piece, text_field: str) -> Iterator[Document]:
    for line in _lines_of(file, piece):
        try:
            yield Document(_text_of(line.content, text_field), len(line.content))
        except DataError as error:
            raise DataError(error.fact, where=line.where(), hint=error.hint) from None


def _first_line(file: BinaryIO, start: int) -> int:
    """Move to the first line that begins at `start` or later."""
    if start:
        file.seek(start - 1)
        return start - 1 + len(file.readline())
    return 0


def _lines_before(piece: Piece) -> int:
    """Lines that begin before the piece, for error texts."""
    if not piece.start:
        return 0
    count, left = 0, piece.start - 1
    with piece.path.open("rb") as file:
        while left > 0 and (part := file.read(min(left, 1 << 24))):
            count, left = count + part.count(b"\n"), left - len(part)
    return count + 1


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        _require_size(len(line), str(path))
        yield line


def _text_of(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the line is not JSON ({error})", hint="each line is one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"the line is a JSON {type(record).__name__}, not an object")
    if text_field not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "nothing"
        is_chat = not {"messages", "conversations", "chosen", "completion", "output"}.isdisjoint(record)
        advice = "these are chats: add `--chat auto`" if is_chat else "name one with --field"
        raise DataError(f"the line has no field {text_field!r}", hint=f"the object has {keys}; {advice}")
    return _valid(record[text_field], "", text_field)


def _valid(text: Any, where: str, text_field: str) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"field {text_field!r} is {json.dumps(text, default=str)[:40]}, not text", where=where
        )
    # A lone surrogate is legal in JSON and not in UTF-8, which tokenizers need.
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fact = f"the text is not UTF-8: byte 0x{content[error.start]:02x} after {error.start} bytes"
        raise DataError(fact, where=where, hint="convert it first: `iconv -f latin1 -t utf-8`") from error


def _require_size(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_DOCUMENT_BYTES:
        fact = f"one document is larger than {show_bytes(MAX_DOCUMENT_BYTES)}"
        raise DataError(fact, where=where, hint="split it into documents: `--split blank-line`, or .jsonl")
