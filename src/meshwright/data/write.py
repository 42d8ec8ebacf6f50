"""Writes a packed dataset atomically: it is either complete or not there."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data.file_check import FileState, sampled_hash
from meshwright.data.sources import (
    DATASET_VERSION,
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    WEIGHTS_DTYPE,
    WEIGHTS_FILE,
    ChatFacts,
    LengthSummary,
    Manifest,
    TokenizerFacts,
    summarize_lengths,
    token_dtype,
)
from meshwright.data.tokenize import HuggingFaceTokenizer, Tokenizer
from meshwright.errors import DataError
from meshwright.files import new_folder_beside


class _HashedFile:
    """A file that is hashed while it is written, so that the hash is of the intended content."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)

    def close(self) -> str:
        """Flush the file to disk (fsync) and return its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        self._file.close()


class DatasetWriter:
    """Appends documents to the files of an unfinished dataset folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, is_weighted: bool = False) -> None:
        self.num_tokens = self.num_documents = 0
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._content = (TOKENS_FILE, DOCUMENTS_FILE) + is_weighted * (WEIGHTS_FILE,)
        self._files = {name: _HashedFile(folder / name) for name in self._content}

    def append(self, documents: list[NDArray[np.unsignedinteger]]) -> None:
        """Write documents, each followed by the end-of-document token."""
        eos = np.array([self._tokenizer.eos_id], dtype=self._dtype)
        tokens = np.concatenate([part for document in documents for part in (document, eos)])
        ends = self.num_tokens + np.cumsum([len(document) + 1 for document in documents], dtype=np.int64)
        self._files[TOKENS_FILE].write(tokens.astype(self._dtype).tobytes())
        self._files[DOCUMENTS_FILE].write(ends.tobytes())
        self.num_tokens, self.num_documents = int(ends[-1]), self.num_documents + len(documents)

    def append_weights(self, weights: list[NDArray[np.floating]]) -> None:
        """Write the loss weights of the appended documents: one for each token, the last one included."""
        self._files[WEIGHTS_FILE].write(np.concatenate(weights).astype(WEIGHTS_DTYPE).tobytes())

    def append_encoded(self, chunks: Iterable[bytes], lengths: NDArray[np.int64]) -> None:
        """Write documents that were encoded before, end-of-document tokens included, as bytes and lengths."""
        for chunk in chunks:
            self._files[TOKENS_FILE].write(chunk)
        ends = self.num_tokens + np.cumsum(lengths)
        self._files[DOCUMENTS_FILE].write(ends.tobytes())
        self.num_tokens += int(lengths.sum())
        self.num_documents += len(lengths)

    def add_file(self, name: str, content: bytes) -> None:
        """Write one more file, which the manifest lists with its hash."""
        self._files[name] = _HashedFile(self._folder / name)
        self._files[name].write(content)

    def finish(self, source_files: list[str], *, chat: ChatFacts | None = None) -> Manifest:
        """Close the files and write the manifest last: a folder without it is not a dataset."""
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            self.add_file(TOKENIZER_FILE, self._tokenizer.content)
        tokenizer = self._tokenizer
        manifest = Manifest(
            version=DATASET_VERSION,
            dtype=self._dtype.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            vocab_size=tokenizer.vocab_size,
            tokenizer=TokenizerFacts(name=tokenizer.name, hash=tokenizer.hash, eos_id=tokenizer.eos_id),
            sha256={name: file.close() for name, file in self._files.items()},
            source_files=source_files,
            sampled={name: sampled_hash(self._folder / name) for name in self._content},
            modified_ns={name: FileState.of(self._folder / name).modified_ns for name in self._content},
            document_tokens=self._lengths(),
            chat=chat,
        )
        last = _HashedFile(self._folder / MANIFEST_FILE)
        last.write((json.dumps(manifest.model_dump(), indent=2) + "\n").encode())
        last.close()
        return manifest

    def _lengths(self) -> LengthSummary | None:
        if not self.num_documents:
            return None
        ends = np.fromfile(self._folder / DOCUMENTS_FILE, dtype=np.int64)
        return summarize_lengths(np.diff(ends, prepend=0))

    def abandon(self) -> None:
        """Close the files without a manifest."""
        for file in self._files.values():
            file.abandon()


@contextmanager
def new_dataset(folder: Path, tokenizer: Tokenizer, *, is_weighted: bool = False) -> Iterator[DatasetWriter]:
    """A writer whose folder appears under its name only if the block succeeds.

    A weighted dataset has a loss weight beside every token: `append_weights` after each `append`.
    Everything is written to a hidden folder beside it, which is renamed at the end. After an error the hidden
    folder is removed; after a kill it stays without a manifest, so it is not read as a dataset.
    """
    require_absent(folder)
    try:
        hidden = new_folder_beside(folder)
        try:
            writer = DatasetWriter(hidden, tokenizer, is_weighted=is_weighted)
            try:
                yield writer
            finally:
                writer.abandon()
            _publish(hidden, folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise DataError(
            f"the dataset cannot be written: {error.strerror or error}",
            where=str(folder),
            hint="free disk space, or name another folder with -o",
        ) from error


def require_absent(folder: Path) -> None:
    """DataError when the folder exists: datasets are never overwritten."""
    if folder.exists() or folder.is_symlink():
        hint = "choose another name, or remove it first if it is not needed"
        fact = "this exists already, and a dataset is never overwritten"
        raise DataError(fact, where=str(folder), hint=hint)


def _publish(hidden: Path, folder: Path) -> None:
    require_absent(folder)
    hidden.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the rename itself must survive a power failure
    finally:
        os.close(descriptor)
