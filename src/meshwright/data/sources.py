"""Random-access token sources: a packed dataset on disk, or tokens in memory.

A packed dataset is a folder of a few files, written by `meshwright data pack`:

    tokens.bin      every token, one after the other, in the smallest unsigned type that holds the vocabulary
    documents.bin   int64, where each document ends (exclusive); the last one is the number of tokens
    weights.bin     float16, the loss weight of each token as a target, where targets differ (chats)
    dataset.json    counts, types, tokenizer and hashes; written last, so a folder without it is unfinished

A dataset packed with a Hugging Face tokenizer also holds its `tokenizer.json`, and so decodes anywhere.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from meshwright.data.file_check import (
    FileState,
    PackedFile,
    damaged,
    require_packed_content,
    require_unchanged,
    sha256_of,
)
from meshwright.errors import DataError
from meshwright.files import MIB, read_json_file
from meshwright.spec.base import Spec

DATASET_VERSION = 1
TOKENS_FILE, DOCUMENTS_FILE, MANIFEST_FILE = "tokens.bin", "documents.bin", "dataset.json"
WEIGHTS_FILE = "weights.bin"
WEIGHTS_DTYPE = np.dtype(np.float16)
TOKENIZER_FILE = "tokenizer.json"
_TOKEN_TYPES = ("uint8", "uint16", "uint32")
# The manifest lists the source files, so that of a large corpus is long.
_MAX_MANIFEST_BYTES = 512 * MIB


class TokenSource(Protocol):
    """Random-access tokens with document ends: everything that a batch needs."""

    @property
    def name(self) -> str:
        """Name in messages: a path, or a description of the generated corpus."""
        ...

    @property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """All tokens, possibly a memory map."""
        ...

    @property
    def document_ends(self) -> NDArray[np.int64]:
        """The end of each document, exclusive and increasing; the last is the number of tokens."""
        ...

    @property
    def loss_weights(self) -> NDArray[np.floating] | None:
        """The loss weight of each token as a target, 0 where it does not count; None: all count alike."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest possible token id + 1."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that is equal exactly when tokens and documents are equal."""
        ...

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        ...


@dataclass(frozen=True)
class TokensInMemory:
    """A token source in memory: the generated corpus, and tests."""

    name: str
    tokens: NDArray[np.unsignedinteger]
    document_ends: NDArray[np.int64]
    vocab_size: int
    fingerprint: str
    loss_weights: NDArray[np.floating] | None = None

    def require_unchanged(self) -> None:
        """Does nothing: nobody else can change memory."""


class TokenizerFacts(Spec):
    """The tokenizer of a dataset."""

    name: str
    hash: str
    """Sixteen hex digits, a hash of the tokenizer's definition."""
    eos_id: int


class LengthSummary(Spec):
    """Document lengths of a dataset in a few numbers, for the planner."""

    mean: float
    mean_square: float
    """Mean of the squared lengths: attention within documents costs in proportion to it."""
    percentiles: list[int]
    """The 0th, 5th, ... and 100th percentile: 21 numbers."""


class ChatFacts(Spec):
    """How the tokens and loss weights of chats were made."""

    kind: Literal["chats", "pairs"]
    """pairs: documents 2i and 2i + 1 are the chosen and the rejected answer of pair i."""
    trained: Literal["assistant", "last", "all"]
    """The turns that are trained."""
    masks: Literal["generation tag", "prefix rendering", "none"]
    """How the tokens of a turn were found; none: texts without a template."""
    template_hash: str | None = None
    """Sixteen hex digits of the chat template, whose text is in `chat_template.jinja`."""
    date: str | None = None
    """The date that the template got, where it asks for one."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of the template that were set."""
    special_tokens: dict[str, str] = Field(default_factory=dict)
    """Special tokens by the names that the template reads, such as bos_token."""
    num_trained: int
    """Trained tokens."""
    end_tokens: dict[str, int]
    """Trained turns by their last trained token; "" where that is text: the model does not learn to stop."""


class Manifest(Spec):
    """The content of `dataset.json`."""

    version: int
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    tokenizer: TokenizerFacts
    sha256: dict[str, str]
    """Hash of every other file in the folder, by file name."""
    source_files: list[str]
    sampled: dict[str, str] = Field(default_factory=dict)
    """Hash of samples of tokens.bin and documents.bin, which every start compares."""
    modified_ns: dict[str, int] = Field(default_factory=dict)
    """Modification time of these files, nanoseconds since 1970."""
    document_tokens: LengthSummary | None = None
    """Lengths of the documents; None in datasets of earlier versions."""
    chat: ChatFacts | None = None
    """How chats were rendered; None in datasets of plain documents."""


@dataclass(frozen=True)
class TokenFile:
    """A packed dataset, memory-mapped: opening it reads no tokens."""

    folder: Path
    manifest: Manifest
    tokens: NDArray[np.unsignedinteger]
    document_ends: NDArray[np.int64]
    states: tuple[tuple[Path, FileState], ...] = ()
    """The files as they were opened."""
    loss_weights: NDArray[np.floating] | None = None
    """The loss weight of each token as a target; None: all count alike."""

    @staticmethod
    def open(folder: str | Path, *, check_content: bool = True) -> "TokenFile":
        """Memory-map the dataset at `folder`; DataError when it is missing, unfinished or damaged.

        Without `check_content` nothing is compared with the hashes: `damage` then reads every byte.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        dtype = np.dtype(manifest.dtype)
        tokens = _mapped(folder / TOKENS_FILE, dtype, manifest.num_tokens)
        document_ends = _mapped(folder / DOCUMENTS_FILE, np.dtype(np.int64), manifest.num_documents)
        if document_ends[-1] != manifest.num_tokens:
            raise damaged(
                folder / DOCUMENTS_FILE,
                f"the last document ends at {document_ends[-1]}, but there are {manifest.num_tokens} tokens",
            )
        if check_content:
            _require_packed_content(folder, manifest)
        names = _content_files(manifest)
        is_weighted = WEIGHTS_FILE in names
        weights = _mapped(folder / WEIGHTS_FILE, WEIGHTS_DTYPE, manifest.num_tokens) if is_weighted else None
        states = tuple((folder / name, FileState.of(folder / name)) for name in names)
        return TokenFile(folder, manifest, tokens, document_ends, states, weights)

    @property
    def name(self) -> str:
        """The path of the folder."""
        return str(self.folder)

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer that packed it."""
        return self.manifest.vocab_size

    @property
    def fingerprint(self) -> str:
        """A hash of the hashes in the manifest: no token is read."""
        content = "".join(self.manifest.sha256[file] for file in _content_files(self.manifest))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened; reading it could end the process."""
        for file, state in self.states:
            require_unchanged(file, state)

    def document(self, index: int) -> NDArray[np.unsignedinteger]:
        """The tokens of one document, its end-of-document token included."""
        start = int(self.document_ends[index - 1]) if index else 0
        return self.tokens[start : int(self.document_ends[index])]

    def damage(self) -> list[str]:
        """Everything wrong with the files, as facts; reads every byte. Empty when they are intact."""
        facts = [
            f"{file}: sha256 is {found[:16]}..., dataset.json has {expected[:16]}..."
            for file, expected in self.manifest.sha256.items()
            if (found := sha256_of(self.folder / file)) != expected
        ]
        if (np.diff(self.document_ends, prepend=0) <= 0).any():
            facts.append(f"{DOCUMENTS_FILE}: document ends do not increase")
        largest = max(int(part.max()) for part in in_parts(self.tokens))
        if largest >= self.vocab_size:
            facts.append(
                f"{TOKENS_FILE}: token {largest} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return facts


def summarize_lengths(lengths: NDArray[np.int64]) -> LengthSummary:
    """The lengths of documents in a few numbers."""
    exact = lengths.astype(np.float64)
    percentiles = np.percentile(lengths, np.arange(0, 101, 5), method="nearest")
    return LengthSummary(
        mean=float(exact.mean()),
        mean_square=float((exact * exact).mean()),
        percentiles=[int(each) for each in percentiles],
    )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every token of a vocabulary."""
    for name in _TOKEN_TYPES:
        if vocab_size - 1 <= np.iinfo(name).max:
            return np.dtype(name)
    raise DataError(f"a vocabulary of {vocab_size} tokens does not fit 32 bits", where="tokenizer")


def read_manifest(folder: Path) -> Manifest:
    """The validated `dataset.json` of a packed dataset."""
    path = folder / MANIFEST_FILE
    _require_dataset(folder)
    try:
        manifest = Manifest.model_validate(read_json_file(path, max_bytes=_MAX_MANIFEST_BYTES))
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:  # ValidationError is a ValueError
        raise damaged(path, f"the file is not a dataset description ({_first_line(error)})") from error
    if manifest.version != DATASET_VERSION:
        fact = f"dataset version {manifest.version}, this program reads version {DATASET_VERSION}"
        raise DataError(fact, where=str(path), hint="pack the dataset again with `meshwright data pack`")
    if manifest.dtype not in _TOKEN_TYPES or min(manifest.num_documents, manifest.num_tokens) < 1:
        raise damaged(path, f"dtype {manifest.dtype!r} with {manifest.num_tokens} tokens is not valid")
    if missing := {TOKENS_FILE, DOCUMENTS_FILE} - set(manifest.sha256):
        raise damaged(path, f"there is no hash of {', '.join(sorted(missing))}")
    return manifest


def in_parts(tokens: NDArray[np.unsignedinteger], part_tokens: int = 1 << 22):
    """Successive chunks of a token array, so that a pass over it needs little memory."""
    for start in range(0, len(tokens), part_tokens):
        yield tokens[start : start + part_tokens]


def _content_files(manifest: Manifest) -> list[str]:
    """The files that training reads."""
    return [name for name in (TOKENS_FILE, DOCUMENTS_FILE, WEIGHTS_FILE) if name in manifest.sha256]


def _require_packed_content(folder: Path, manifest: Manifest) -> None:
    for name in _content_files(manifest):
        packed = PackedFile(manifest.sha256[name], manifest.sampled.get(name), manifest.modified_ns.get(name))
        require_packed_content(folder / name, packed)


def _require_dataset(folder: Path) -> None:
    if not folder.exists():
        hint = "pack one with `meshwright data pack`, or use data.synthetic for a generated corpus"
        raise DataError("there is no dataset here", where=str(folder), hint=hint)
    if not folder.is_dir():
        hint = f"a dataset is a folder; pack this file first: `meshwright data pack {folder} -o dataset`"
        raise DataError("this is a file, not a packed dataset", where=str(folder), hint=hint)
    if not (folder / MANIFEST_FILE).is_file():
        hint = "packing did not finish, or this is another folder; pack again with `meshwright data pack`"
        raise DataError(
            f"the folder is not a packed dataset: it has no {MANIFEST_FILE}", where=str(folder), hint=hint
        )


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if not path.is_file():
        raise damaged(path, "the file is missing")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise damaged(path, f"the file has {size} bytes, dataset.json has {expected}")
    try:
        # A plain view: slices of np.memmap are a subclass and several times slower to make.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except OSError as error:
        raise damaged(path, f"the file cannot be read: {error.strerror}") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).splitlines()[0]
