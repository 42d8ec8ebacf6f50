"""Text to tokens and back: raw bytes, or a Hugging Face `tokenizer.json`."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources import MANIFEST_FILE, TOKENIZER_FILE, TokenizerFacts, read_manifest
from meshwright.errors import DataError, MeshwrightError
from meshwright.files import MIB, read_bounded, read_json_file
from meshwright.spec import DataSpec

BYTE_TOKENIZER = "bytes"
BYTE_VOCAB_SIZE = 257
BYTE_EOS_ID = 256
_MAX_TOKENIZER_BYTES = 512 * MIB
# Names of the end-of-document token in current model families, in the order in which they are tried.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")


class Tokenizer(Protocol):
    """The interface of tokenizers."""

    @property
    def name(self) -> str:
        """`bytes`, or the file that it was read from."""
        ...

    @property
    def hash(self) -> str:
        """Sixteen hex digits, equal when the same text has the same tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-document token."""
        ...

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of each text, without the end of document."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; end-of-document tokens have no text."""
        ...


class ByteTokenizer:
    """A tokenizer in which each UTF-8 byte is a token, and 256 is the end-of-document token.

    A text may contain any byte, so the end of a document needs a token of its own: the vocabulary has 257.
    """

    name = BYTE_TOKENIZER
    hash = hashlib.sha256(b"bytes, eos 256").hexdigest()[:16]
    vocab_size = BYTE_VOCAB_SIZE
    eos_id = BYTE_EOS_ID

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """The UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 (after truncation) become replacement characters."""
        return bytes(token for token in tokens if token < BYTE_EOS_ID).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` file. No special tokens are added to texts: packing adds the end of document."""

    def __init__(self, path: Path, *, eos: str | None = None, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self.content = _read(path)
        self._tokenizer = _load(path, self.content)
        self.hash = hashlib.sha256(self.content).hexdigest()[:16]
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise DataError("the tokenizer's vocabulary is empty", where=str(path))
        self.eos_id = self._find_eos(eos or _configured_eos(path))

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of each text; the library encodes them on all cores, without offsets into the text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encodings(self, texts: Sequence[str], *, with_offsets: bool) -> list[Any]:
        """The `tokenizers.Encoding` of each text; with offsets it maps characters to tokens."""
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        return encode(list(texts), add_special_tokens=False) if texts else []

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are control tokens of the model, not text; the end of document is one in any case."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = (token_id for token_id, token in added.items() if token.special)
        return frozenset([*special, self.eos_id])

    def dividers(self, text: str) -> list[tuple[int, int, int]]:
        """(first character, end, id) of each added token in a text: what lies between them is encoded alone.

        The tokens of a text from a divider on are therefore those of the rest of the text by itself.
        """
        pattern, ids = self._divider_pattern
        found = pattern.finditer(text) if pattern else ()
        return [(match.start(), match.end(), ids[match.group()]) for match in found]

    @cached_property
    def divider_ids(self) -> NDArray[np.uint32]:
        """The tokens that `dividers` looks for."""
        return np.array(sorted(self._divider_pattern[1].values()), dtype=np.uint32)

    @cached_property
    def _divider_pattern(self) -> tuple[re.Pattern[str] | None, dict[str, int]]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        dividing = [(token, token_id) for token_id, token in added if not token.normalized]
        if not dividing or any(token.single_word for token, _ in dividing):
            return None, {}
        ids = {token.content: token_id for token, token_id in dividing}
        longest_first = sorted(ids, key=len, reverse=True)  # as the library chooses
        return re.compile("|".join(map(re.escape, longest_first))), ids

    def tokens_after(self, lead: str, text: str) -> list[int] | None:
        """The tokens of a text that follows `lead`, without those of `lead`; None where one is of both."""
        before, both = (each.ids for each in self.encodings([lead, lead + text], with_offsets=False))
        return both[len(before) :] if both[: len(before)] == before else None

    @cached_property
    def begin_ids(self) -> list[int]:
        """Tokens that the tokenizer puts before a text (BOS), without the end of document."""
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        return [token_id for token_id in ids if token_id != self.eos_id]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special tokens and tokens outside the vocabulary have no text."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def decode_with_special(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def ids_of(self, tokens: Iterable[str | int]) -> list[int]:
        """The ids of tokens by name or id; names outside the vocabulary are left out."""
        found = (self._tokenizer.token_to_id(each) if isinstance(each, str) else each for each in tokens)
        return [token_id for token_id in found if token_id is not None]

    def has_tokens_of(self, content: bytes) -> bool:
        """Whether every token of another `tokenizer.json` has the same id here."""
        if content == self.content:
            return True
        try:
            other = _load(self.path, content).get_vocab(with_added_tokens=True)
        except DataError:
            return False
        return other.items() <= self._tokenizer.get_vocab(with_added_tokens=True).items()

    def token(self, token_id: int) -> str | None:
        """The text of one token, special or not; None outside the vocabulary."""
        return self._tokenizer.id_to_token(token_id)

    def _find_eos(self, eos: str | None) -> int:
        for name in [eos] if eos else _EOS_NAMES:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        fact = (
            f"the tokenizer has no token {eos!r}"
            if eos
            else "the tokenizer has no known end-of-document token"
        )
        raise DataError(fact, where=str(self.path), hint="name one of its tokens: `--eos '<|endoftext|>'`")


def open_tokenizer(name: str, *, eos: str | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer at a path: a tokenizer.json or a folder that holds one."""
    if name == BYTE_TOKENIZER:
        if eos is not None:
            raise DataError(
                "the byte tokenizer ends documents with token 256; --eos has no effect", where="--eos"
            )
        return ByteTokenizer()
    path = Path(name)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if not path.is_file():
        hint = f"use `{BYTE_TOKENIZER}`, a {TOKENIZER_FILE}, or a folder that holds one"
        raise DataError("there is no tokenizer here", where=name, hint=hint)
    return HuggingFaceTokenizer(path, eos=eos)


def tokenizer_for(spec: DataSpec) -> Tokenizer:
    """The tokenizer of a run's data: bytes for the generated corpus."""
    paths = [source.path for source in spec.sources if source.path is not None]
    if not paths:
        return ByteTokenizer()
    # The datasets of a blend have one tokenizer, and a Megatron pair does not name its own.
    packed = [Path(path) for path in paths if (Path(path) / MANIFEST_FILE).is_file()]
    if not packed and Path(f"{paths[0]}.idx").is_file():
        raise DataError(
            "a Megatron .bin/.idx pair does not name its tokenizer",
            where=paths[0],
            hint="name it with --tokenizer: a tokenizer.json, a folder with one, or `bytes`",
        )
    folder = packed[0] if packed else Path(paths[0])
    return tokenizer_of(folder, read_manifest(folder).tokenizer)


def has_other_tokenizer(spec: DataSpec, folder: Path) -> bool:
    """Whether a run's data was packed with a tokenizer whose ids mean other things than in a model's folder.

    A tokenizer with new tokens beside those of the model is the model's.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file() or not any(source.path is not None for source in spec.sources):
        return False
    try:
        tokenizer = tokenizer_for(spec)
        return not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.has_tokens_of(_read(file))
    except (MeshwrightError, OSError):  # data that names no tokenizer
        return False


def tokenizer_of(folder: Path, facts: TokenizerFacts) -> Tokenizer:
    """The tokenizer that packed the dataset in `folder`, from the copy in that folder."""
    if facts.name == BYTE_TOKENIZER:
        return ByteTokenizer()
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(f"the copy of tokenizer {facts.name!r} is missing", where=str(path))
    tokenizer = HuggingFaceTokenizer(path, name=facts.name, eos=_token_name(path, facts.eos_id))
    if tokenizer.hash != facts.hash:
        fact = (
            f"this is not the tokenizer that packed the dataset: hash {tokenizer.hash}, expected {facts.hash}"
        )
        raise DataError(fact, where=str(path), hint="restore the dataset's own copy, or pack again")
    return tokenizer


def _token_name(path: Path, token_id: int) -> str:
    name = _load(path, _read(path)).id_to_token(token_id)
    if name is None:
        raise DataError(
            f"the tokenizer has no token number {token_id}", where=str(path), hint="pack the dataset again"
        )
    return name


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, max_bytes=_MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _load(path: Path, content: bytes):
    try:
        from tokenizers import Tokenizer as LibraryTokenizer  # noqa: PLC0415  only where a tokenizer.json is used
    except ImportError as error:
        hint = 'install it with `pip install "meshwright[train]"`, or use the byte tokenizer'
        raise DataError("this needs the tokenizers library", where=str(path), hint=hint) from error
    try:
        tokenizer = LibraryTokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception on a malformed file
        hint = "save it with `save_pretrained` or `Tokenizer.save`; a vocabulary file alone is not enough"
        raise DataError(
            f"the file is not a Hugging Face tokenizer.json ({error})", where=str(path), hint=hint
        ) from error
    # Settings for a model's input, which would cut and pad documents without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _configured_eos(path: Path) -> str | None:
    """The end-of-sequence token in the `tokenizer_config.json` beside a tokenizer, if any."""
    try:
        config = read_json_file(path.parent / "tokenizer_config.json", max_bytes=16 * MIB)
    except (OSError, ValueError):
        return None
    eos = config.get("eos_token") if isinstance(config, dict) else None
    return eos.get("content") if isinstance(eos, dict) else eos
