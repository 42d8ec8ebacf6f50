"""Steps of `meshwright data pack`: what it refuses, and the files that it writes."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.data_text import progress_bar

if TYPE_CHECKING:
    from meshwright.data.text_input import TextFormat
    from meshwright.data.tokenize import Tokenizer

# Below this, starting worker processes takes longer than it saves.
_MIN_BYTES_FOR_PROCESSES = 64 << 20


class OutputFormat(StrEnum):
    """The files that `data pack` writes."""

    TOKENS = "tokens"
    MEGATRON = "megatron"


class SplitAt(StrEnum):
    """Where a .txt file is split into documents."""

    FILE = "file"
    BLANK_LINE = "blank-line"


def packed_files(
    files: list[Path],
    target: Path,
    tokenizer: "Tokenizer",
    text_format: "TextFormat",
    *,
    processes: int | None,
    quiet: bool,
) -> "dict[str, Any]":
    """Pack text files, in worker processes where that pays; the manifest of the dataset."""
    from meshwright.data.pack import pack as pack_files
    from meshwright.data.pack_parts import pack_in_parts

    total = sum(file.stat().st_size for file in files)
    count = processes or (os.cpu_count() or 1 if total >= _MIN_BYTES_FOR_PROCESSES else 1)
    options: dict[str, Any] = {"tokenizer": tokenizer, "text_format": text_format}
    with progress_bar("packing", total, quiet=quiet) as advance:
        if count > 1:
            packed = pack_in_parts(files, target, num_processes=count, progress=advance, **options)
        else:
            packed = pack_files(files, target, progress=advance, **options)
    return {**packed.manifest.model_dump(), "empty_documents": packed.num_empty}


def require_chat_output(output_format: OutputFormat, *, split: SplitAt | None, field: str | None) -> None:
    """DataError where an option of text files is set for chats."""
    from meshwright.errors import DataError

    if output_format is not OutputFormat.TOKENS:
        fact = "Megatron's files have no loss weights, which chats need"
        raise DataError(fact, where="--format", hint="leave out --format")
    for name, value in (("--split", split), ("--field", field)):
        if value is not None:
            raise DataError("chats are records with known fields; this has no effect", where=name)


def require_no_output(output: Path, output_format: OutputFormat) -> None:
    """DataError where a file would be overwritten."""
    from meshwright.data.readers.megatron import pair_of
    from meshwright.data.write import require_absent

    for path in pair_of(output) if output_format is OutputFormat.MEGATRON else (output,):
        require_absent(path)


def write_megatron_pair(folder: Path, prefix: Path) -> None:
    """Write a packed dataset as Megatron's .bin and .idx, and remove it."""
    import shutil

    from meshwright.data.readers.megatron import write_megatron
    from meshwright.data.sources import TokenFile

    dataset = TokenFile.open(folder)
    documents = (dataset.document(index) for index in range(dataset.manifest.num_documents))
    write_megatron(prefix, documents, vocab_size=dataset.vocab_size)
    shutil.rmtree(folder)


def require_effect(files: list[Path], *, split: SplitAt | None, field: str | None) -> None:
    """DataError where an option has no effect on any of the files."""
    from meshwright.data.text_input import TEXT, kind_of
    from meshwright.errors import DataError

    kinds = {kind_of(file) for file in files}
    if split is not None and TEXT not in kinds:
        raise DataError("no .txt file is packed, so --split has no effect", where="--split")
    if field is not None and kinds == {TEXT}:
        raise DataError("no .jsonl file is packed, so --field has no effect", where="--field")
