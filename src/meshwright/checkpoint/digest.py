"""Digests of checkpoint files: XXH3 (128 bits) of every chunk, so that a part of a file is verified alone.

A manifest's entry of a file is

    {"bytes": 40000000, "chunk_bytes": 16777216, "xxh3_128": ["99aa06d3014798d86001c324468d497f", ...]}

Format version 2 has {"bytes": ..., "sha256": "..."}, one digest of the file. Both find flipped bits and
truncated files. Neither is a signature: who may change a file of a checkpoint may change its manifest too.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from meshwright.errors import CheckpointError

CHUNK_BYTES = 16 << 20


class DamagedCheckpoint(CheckpointError):
    """The files of a checkpoint are not those that were saved; an older one may be intact."""


def file_entry(num_bytes: int, digests: Iterable[str]) -> dict[str, Any]:
    """The manifest's entry of a file, from the digests of its chunks in their order."""
    return {"bytes": num_bytes, "chunk_bytes": CHUNK_BYTES, "xxh3_128": list(digests)}


def entry_of_bytes(content: bytes | memoryview) -> dict[str, Any]:
    """The manifest's entry of a file with this content."""
    view = memoryview(content)
    parts = (view[begin : begin + CHUNK_BYTES] for begin in range(0, len(view), CHUNK_BYTES))
    return file_entry(len(view), (digest_of(part) for part in parts))


def digest_of(content: bytes | memoryview) -> str:
    """The digest of one chunk. Releases the GIL."""
    return xxhash.xxh3_128_hexdigest(content)


def is_entry(entry: Any) -> bool:
    """Whether this is an entry of format version 2 or 3."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
        return False
    return isinstance(entry.get("sha256"), str) or _has_chunks(entry)


def _has_chunks(entry: Mapping[str, Any]) -> bool:
    size, digests = entry.get("chunk_bytes"), entry.get("xxh3_128")
    if type(size) is not int or size <= 0 or not isinstance(digests, list):
        return False
    return len(digests) == -(-entry["bytes"] // size) and all(isinstance(one, str) for one in digests)


def content_id(entry: Mapping[str, Any]) -> str:
    """A text that is the same for two files of the same content and format version."""
    return entry["sha256"] if "sha256" in entry else "".join(entry["xxh3_128"])


def matches_entry(entry: Mapping[str, Any], read: Callable[[int, int], bytes]) -> bool:
    """Whether a file is the one of the manifest; `read` gives its bytes from an offset to another."""
    size = entry.get("chunk_bytes", CHUNK_BYTES)
    ranges = [(begin, min(begin + size, entry["bytes"])) for begin in range(0, entry["bytes"], size)]
    if "sha256" in entry:
        digest = hashlib.sha256()
        for begin, end in ranges:
            digest.update(read(begin, end))
        return digest.hexdigest() == entry["sha256"]
    return all(digest_of(read(*each)) == one for each, one in zip(ranges, entry["xxh3_128"], strict=True))


def require_size(path: Path, entry: Mapping[str, Any]) -> None:
    """Refuse a file that is missing or of another size than the manifest says."""
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        raise differs(path)


def differs(path: Path) -> DamagedCheckpoint:
    """The error of a file that is not what the manifest says."""
    hint = "use an older checkpoint: this one is damaged"
    return DamagedCheckpoint(f"{path.name} differs from the manifest", where=str(path.parent), hint=hint)
