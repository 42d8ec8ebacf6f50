"""Megatron's indexed datasets, `.bin` and `.idx`, read and written.

The `.idx` file: the magic `MMIDIDX`, a version, the type of a token, the number of sequences and of document
borders; then tokens of each sequence (int32), byte offset of each sequence (int64), and the sequence at which
each document begins (int64). The `.bin` file holds the tokens one after the other.
"""

import hashlib
import os
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.file_check import FileState, damaged, require_unchanged, sampled_hash
from meshwright.data.records import KEY, Record
from meshwright.data.write import require_absent
from meshwright.errors import DataError
from meshwright.files import new_folder_beside

BIN_SUFFIX, IDX_SUFFIX = ".bin", ".idx"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
# Megatron's own limit for 16 bits; it leaves room for tokens that are added to a vocabulary.
_MAX_UINT16_VOCABULARY = 65500


class MegatronIndex:
    """The `.idx` file of a pair, memory-mapped."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """`num_bytes` is the size of the `.bin` file, with which the index must agree."""
        self.path = path
        self.dtype, num_sequences, num_borders = _read_header(path)
        at, sections = _HEADER.size, []
        for kind, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_borders)):
            sections.append(_section(path, np.dtype(kind), count, at))
            at += count * np.dtype(kind).itemsize
        self.sequence_lengths, self.pointers, self.borders = sections
        self._num_bytes = num_bytes
        self._require_consistent()

    @cached_property
    def document_ends(self) -> NDArray[np.int64]:
        """The end of each document that has tokens, in tokens."""
        ends = np.append(self.pointers[1:], self._num_bytes) // self.dtype.itemsize
        ends = ends[self.borders[1:] - 1] if len(self.borders) != len(ends) + 1 else ends
        return ends[np.diff(ends, prepend=0) > 0]

    def fingerprint(self, hash_of_tokens: str) -> str:
        """A hash of samples of both files."""
        return hashlib.sha256((hash_of_tokens + sampled_hash(self.path)).encode()).hexdigest()[:16]

    def _require_consistent(self) -> None:
        last = int(self.pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if self.pointers[0] != 0 or last != self._num_bytes:
            fact = f"the index ends at byte {last}, the {BIN_SUFFIX} file has {self._num_bytes} bytes"
            raise damaged(self.path, fact)
        if self.borders[-1] != len(self.sequence_lengths):
            fact = f"documents end at sequence {self.borders[-1]} of {len(self.sequence_lengths)}"
            raise damaged(self.path, fact)


class MegatronTokens:
    """The documents of a `.bin`/`.idx` pair: a record source, and a token source for training."""

    def __init__(self, prefix: Path | str, *, vocab_size: int | None = None) -> None:
        """Memory-map the pair; `vocab_size` is the bound of token ids, which the files do not contain."""
        self.prefix = Path(prefix)
        self.name = str(prefix)
        bin_path, idx_path = pair_of(self.prefix)
        self._states = tuple((path, FileState.of(path)) for path in (bin_path, idx_path))
        dtype, _, _ = _read_header(idx_path)
        self.tokens: NDArray[Any] = _mapped_tokens(bin_path, dtype)
        self.index = MegatronIndex(idx_path, self.tokens.nbytes)
        self.vocab_size = vocab_size or int(np.iinfo(dtype).max) + 1

    @property
    def fingerprint(self) -> str:
        """A hash of samples of both files."""
        return self.index.fingerprint(sampled_hash(self._states[0][0]))

    @property
    def document_ends(self) -> NDArray[np.int64]:
        """The end of each document that has tokens, in tokens."""
        return self.index.document_ends

    @property
    def loss_weights(self) -> None:
        """None: the files have no weights, so every target counts alike."""
        return

    def __len__(self) -> int:
        """Number of documents with tokens."""
        return len(self.document_ends)

    def record(self, index: int) -> Record:
        """The document at `index`, as `tokens`."""
        end = int(self.document_ends[index])
        start = int(self.document_ends[index - 1]) if index else 0
        return {KEY: str(index), "tokens": self.tokens[start:end]}

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.document_ends, prepend=0)

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened."""
        for path, state in self._states:
            require_unchanged(path, state)

    def damage(self) -> list[str]:
        """Everything wrong with the pair, as facts; reads the index and every token."""
        facts = []
        lengths, borders = self.index.sequence_lengths, self.index.borders
        expected = np.cumsum(lengths, dtype=np.int64) * self.tokens.itemsize
        if not np.array_equal(self.index.pointers[1:], expected[:-1]) or (lengths < 0).any():
            facts.append(f"{self.name}{IDX_SUFFIX}: sequences do not follow each other")
        if (np.diff(borders) < 0).any() or borders[0] != 0:
            facts.append(f"{self.name}{IDX_SUFFIX}: document borders do not increase")
        for start in range(0, len(self.tokens), 1 << 22):
            part = self.tokens[start : start + (1 << 22)]
            wrong = np.flatnonzero((part < 0) | (part >= self.vocab_size))
            if len(wrong):
                at = start + int(wrong[0])
                token, size = int(self.tokens[at]), self.vocab_size
                fact = f"token {token} at position {at} is outside the vocabulary of {size} tokens"
                return [*facts, f"{self.name}{BIN_SUFFIX}: {fact}"]
        return facts

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.name, self.vocab_size)


def pair_of(prefix: Path) -> tuple[Path, Path]:
    """The `.bin` and `.idx` file of a prefix."""
    return prefix.with_name(prefix.name + BIN_SUFFIX), prefix.with_name(prefix.name + IDX_SUFFIX)


def write_megatron(prefix: Path, documents: Iterable[NDArray[Any]], *, vocab_size: int) -> int:
    """Write documents as a `.bin`/`.idx` pair, which appears when it is complete; returns their number."""
    bin_path, idx_path = pair_of(prefix)
    require_absent(bin_path)
    require_absent(idx_path)
    dtype = np.dtype("<u2" if vocab_size < _MAX_UINT16_VOCABULARY else "<i4")
    hidden = new_folder_beside(prefix)
    try:
        lengths = _write_tokens(hidden / "bin", documents, dtype)
        _write_index(hidden / "idx", lengths, dtype)
        (hidden / "bin").rename(bin_path)
        (hidden / "idx").rename(idx_path)  # last: a .bin without .idx is not a dataset
    finally:
        for left in hidden.iterdir():
            left.unlink()
        hidden.rmdir()
    return len(lengths)


def _write_tokens(path: Path, documents: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[np.int32]:
    lengths: list[int] = []
    with path.open("wb") as file:
        for document in documents:
            file.write(np.ascontiguousarray(document, dtype=dtype).tobytes())
            lengths.append(len(document))
        file.flush()
        os.fsync(file.fileno())
    if not lengths:
        raise DataError("there is no document to write", where=str(path.parent))
    return np.array(lengths, dtype=np.int32)


def _write_index(path: Path, lengths: NDArray[np.int32], dtype: np.dtype[Any]) -> None:
    code = next(code for code, name in _TYPES.items() if name == dtype.name)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * dtype.itemsize])
    borders = np.arange(len(lengths) + 1, dtype="<i8")
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(borders)))
        for section in (lengths.astype("<i4"), pointers.astype("<i8"), borders):
            file.write(section.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADER.size)
    except OSError as error:
        raise damaged(path, f"the file cannot be read: {error.strerror}") from error
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise DataError("the file is no index of a Megatron dataset", where=str(path))
    _, version, code, num_sequences, num_borders = _HEADER.unpack(raw)
    if version != 1 or code not in _TYPES:
        raise damaged(path, f"version {version} with token type {code} is not known")
    if not num_sequences or num_borders < 2:
        raise damaged(path, "there is no sequence")
    return np.dtype(_TYPES[code]), num_sequences, num_borders


def _section(path: Path, dtype: np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
    if path.stat().st_size < offset + count * dtype.itemsize:
        raise damaged(path, f"the file has {path.stat().st_size} bytes, which is less than its header says")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _mapped_tokens(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise damaged(path, f"the file has {size} bytes, which is no number of {dtype.name} tokens")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _reopened(name: str, vocab_size: int) -> MegatronTokens:
    return MegatronTokens(name, vocab_size=vocab_size)
