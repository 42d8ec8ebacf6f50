"""Text files to a packed dataset, one document at a time: memory never holds the full corpus."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from meshwright.data.sources import Manifest
from meshwright.data.tokenize import Tokenizer
from meshwright.data.write import DatasetWriter, new_dataset, require_absent
from meshwright.errors import DataError
from meshwright.units import show_bytes

Split = Literal["file", "blank-line"]
TEXT_SUFFIX, JSON_LINES_SUFFIX = ".txt", ".jsonl"
# A document is tokenized at once, so memory holds several copies of one.
MAX_DOCUMENT_BYTES = 1 << 30
# Documents are tokenized in groups up to this size: enough to keep every core busy, small in memory.
_GROUP_BYTES, _GROUP_DOCUMENTS = 1 << 22, 4096


@dataclass(frozen=True)
class TextFormat:
    """How text files are read."""

    split: Split = "file"
    """.txt files: a document is a file, or the text between blank lines."""
    text_field: str = "text"
    """.jsonl files: the key whose value is the document."""


class Packed(NamedTuple):
    """The result of packing."""

    manifest: Manifest
    num_empty: int
    """Documents without text, which are left out."""


class _Document(NamedTuple):
    text: str
    num_bytes: int
    """Bytes read from the file since the document before, for progress."""


def pack(
    files: Sequence[Path],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    text_format: TextFormat | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Packed:
    """Tokenize the documents of `files` into a new dataset; `progress` gets the number of bytes read."""
    require_absent(folder)
    num_empty = 0
    with new_dataset(folder, tokenizer) as writer:
        for group in _groups(_documents(files, text_format or TextFormat())):
            texts = [document.text for document in group if document.text]
            num_empty += len(group) - len(texts)
            if texts:
                writer.append(tokenizer.encode(texts))
            progress(sum(document.num_bytes for document in group))
        _require_documents(writer, files)
        manifest = writer.finish([str(file) for file in files])
    return Packed(manifest, num_empty)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The text files at these paths, folders searched recursively, in the order of names."""
    return [file for path in paths for file in _files_at(path)]


def _files_at(path: Path) -> list[Path]:
    kinds = (TEXT_SUFFIX, JSON_LINES_SUFFIX)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in kinds and file.is_file())
        if not found:
            fact, hint = f"the folder holds no {' or '.join(kinds)} file", "name the files themselves"
            raise DataError(fact, where=str(path), hint=hint)
        return found
    if path.exists() and not path.is_file():
        raise DataError("this is no regular file", where=str(path), hint="copy its content into a file first")
    if not path.exists():
        hint = "name files of text, .jsonl files, or folders of them"
        raise DataError("there is no such file or folder", where=str(path), hint=hint)
    if path.suffix not in kinds:
        hint = f"rename it, or convert it to {JSON_LINES_SUFFIX} with one JSON object per line"
        raise DataError(
            f"the file is neither {TEXT_SUFFIX} nor {JSON_LINES_SUFFIX}", where=str(path), hint=hint
        )
    return [path]


def _require_documents(writer: DatasetWriter, files: Sequence[Path]) -> None:
    if writer.num_documents == 0:
        places = ", ".join(str(file) for file in files[:3])
        raise DataError(
            f"{len(files)} file{'s' * (len(files) > 1)} without any text",
            where=places,
            hint="check the files and --field",
        )


def _groups(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    group: list[_Document] = []
    num_bytes = 0
    for document in documents:
        group.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _documents(files: Sequence[Path], text_format: TextFormat) -> Iterator[_Document]:
    for path in files:
        try:
            with path.open("rb") as file:
                if path.suffix == JSON_LINES_SUFFIX:
                    yield from _json_lines(file, path, text_format.text_field)
                elif text_format.split == "blank-line":
                    yield from _paragraphs(file, path)
                else:
                    yield _file_document(file, path)
        except OSError as error:
            raise DataError(f"the file cannot be read: {error.strerror or error}", where=str(path)) from error


def _file_document(file: BinaryIO, path: Path) -> _Document:
    content = file.read(MAX_DOCUMENT_BYTES + 1)
    _require_size(len(content), str(path))
    return _Document(_decode(content, str(path)), len(content))


def _paragraphs(file: BinaryIO, path: Path) -> Iterator[_Document]:
    lines: list[bytes] = []
    first_line = number = num_bytes = 0
    for number, line in enumerate(_lines(file, path), start=1):
        num_bytes += len(line)
        if line.strip():
            first_line = first_line if lines else number
            lines.append(line)
            _require_size(num_bytes, f"{path}:{first_line}")
        elif lines:
            yield _Document(_decode(b"".join(lines), f"{path}:{first_line}"), num_bytes)
            lines, num_bytes = [], 0
    if lines:
        yield _Document(_decode(b"".join(lines), f"{path}:{first_line}"), num_bytes)


def _json_lines(file: BinaryIO, path: Path, text_field: str) -> Iterator[_Document]:
    for number, line in enumerate(_lines(file, path), start=1):
        if line.strip():
            yield _Document(_text_of(line, f"{path}:{number}", text_field), len(line))


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        _require_size(len(line), str(path))
        yield line


def _text_of(line: bytes, where: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the line is not JSON ({error})", where=where, hint="each line is one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"the line is a JSON {type(record).__name__}, not an object", where=where)
    if text_field not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "nothing"
        hint = f"the object has {keys}; name one with --field"
        raise DataError(f"the line has no field {text_field!r}", where=where, hint=hint)
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"field {text_field!r} is {json.dumps(text)[:40]}, not text", where=where)
    # A lone surrogate is legal in JSON and not in UTF-8, which tokenizers need.
    return text.encode("utf-8", errors="replace").decode("utf-8")


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
