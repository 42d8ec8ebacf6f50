"""Text files to a packed dataset, one document at a time: memory never holds the full corpus."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.data.sources import Manifest
from meshwright.data.text_input import Document, Piece, TextFormat, documents
from meshwright.data.tokenize import Tokenizer
from meshwright.data.write import new_dataset, require_absent
from meshwright.errors import DataError

# Documents are tokenized in groups up to this size: enough to keep every core busy, small in memory.
_GROUP_BYTES, _GROUP_DOCUMENTS = 1 << 22, 4096


class Packed(NamedTuple):
    """The result of packing."""

    manifest: Manifest
    num_empty: int
    """Documents without text, which are left out."""


def pack(
    files: Sequence[Path],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    text_format: TextFormat | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Packed:
    """Tokenize the documents of `files` into a new dataset; `progress` gets the number of bytes read.

    One process reads and writes. `pack_in_parts` uses all cores for everything, and resumes after a kill.
    """
    require_absent(folder)
    num_empty = 0
    with new_dataset(folder, tokenizer) as writer:
        for group in groups(documents([Piece(file) for file in files], text_format or TextFormat())):
            texts = [document.text for document in group if document.text]
            num_empty += len(group) - len(texts)
            if texts:
                writer.append(tokenizer.encode(texts))
            progress(sum(document.num_bytes for document in group))
        require_documents(writer.num_documents, files)
        manifest = writer.finish([str(file) for file in files])
    return Packed(manifest, num_empty)


def require_documents(num_documents: int, files: Sequence[Path]) -> None:
    """DataError where the files have no text at all."""
    if num_documents == 0:
        places = ", ".join(str(file) for file in files[:3])
        raise DataError(
            f"{len(files)} file{'s' * (len(files) > 1)} without any text",
            where=places,
            hint="check the files and --field",
        )


def groups(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are tokenized at once."""
    group: list[Document] = []
    num_bytes = 0
    for document in found:
        group.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
