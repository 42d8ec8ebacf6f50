"""Whether the files of a dataset are still those that were packed.

Every start compares sizes, modification times and a hash of samples of each file; a small file whose time
differs (a copy, or a changed file) is hashed in full. `meshwright data verify` reads every byte. During a run
each batch first compares size, time and inode: a file that is truncated or replaced is an error, not a crash.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import DataError

HASH_CHUNK_BYTES = 1 << 22
_SAMPLE_BYTES, _NUM_SAMPLES = 1 << 12, 64
# Reading this much at a start takes well under a second.
_MAX_FULL_HASH_BYTES = 256 << 20


class FileState(NamedTuple):
    """The facts of a file that change when somebody writes to it."""

    num_bytes: int
    modified_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> "FileState":
        """The state of the file now; DataError where it is gone."""
        try:
            status = path.stat()
        except OSError as error:
            raise damaged(path, f"the file cannot be read: {error.strerror}") from None
        return FileState(status.st_size, status.st_mtime_ns, status.st_ino)


class PackedFile(NamedTuple):
    """What a dataset's description says about one of its files."""

    sha256: str
    sampled: str | None
    """`sampled_hash` when it was packed; None in datasets of earlier versions."""
    modified_ns: int | None


def require_packed_content(path: Path, packed: PackedFile) -> None:
    """DataError where the file is not the one that was packed, as far as a quick check can see."""
    if packed.sampled is not None and sampled_hash(path) != packed.sampled:
        raise damaged(path, "the content was changed after packing")
    now = FileState.of(path)
    is_touched = packed.modified_ns != now.modified_ns
    if is_touched and now.num_bytes <= _MAX_FULL_HASH_BYTES and sha256_of(path) != packed.sha256:
        raise damaged(path, "the content was changed after packing")


def require_unchanged(path: Path, before: FileState) -> None:
    """DataError where the file was written to, truncated, replaced or deleted since `before`."""
    now = FileState.of(path)
    if now != before:
        size = f": it has {now.num_bytes} bytes, and had {before.num_bytes}"
        raise damaged(
            path, "the file was changed while it was in use" + size * (now.num_bytes != before.num_bytes)
        )


def sampled_hash(path: Path) -> str:
    """A hash of the size and of evenly spaced pieces of a file, its first and last bytes included."""
    try:
        with path.open("rb") as file:
            descriptor = file.fileno()
            num_bytes = os.fstat(descriptor).st_size
            return sampled_content(num_bytes, lambda at, count: os.pread(descriptor, count, at))
    except OSError as error:
        raise damaged(path, f"the file cannot be read: {error.strerror}") from error


def sampled_content(num_bytes: int, read_at: Callable[[int, int], bytes]) -> str:
    """`sampled_hash` of anything that is read at an offset, such as an object in a store."""
    digest = hashlib.sha256(str(num_bytes).encode())
    last_start = max(0, num_bytes - _SAMPLE_BYTES)
    for number in range(_NUM_SAMPLES):
        at = last_start * number // (_NUM_SAMPLES - 1)
        digest.update(read_at(at, min(_SAMPLE_BYTES, num_bytes - at)))
    return digest.hexdigest()[:32]


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(HASH_CHUNK_BYTES):
                digest.update(part)
    except OSError as error:
        raise damaged(path, f"the file cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def damaged(path: Path, fact: str) -> DataError:
    """The error for a damaged file."""
    hint = "copy the dataset again from an intact copy, or pack it again; `meshwright data verify` checks it"
    return DataError(fact, where=str(path), hint=hint)
