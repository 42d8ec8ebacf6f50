"""Records in several files: where those of each file begin, and whether a file was changed."""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from meshwright.data.file_check import FileState, require_unchanged, sampled_content, sampled_hash
from meshwright.data.readers.places import RemotePlace
from meshwright.errors import DataError


class FileList:
    """The files of a source in order, on a disk or in an object store, with the number of records of each."""

    def __init__(
        self, paths: Sequence[Path], counts: Sequence[int], *, place: RemotePlace | None = None
    ) -> None:
        """`place` is the folder in a store below which the paths are; None for paths on a disk."""
        self.paths, self.counts, self._place = list(paths), list(counts), place
        self._starts = [0, *itertools.accumulate(counts)]
        self._states = [FileState.of(path) for path in paths] if place is None else []
        if not self._starts[-1]:
            raise DataError("there is no record in the dataset", where=str(paths[0]) if paths else "")

    def __len__(self) -> int:
        """Number of records."""
        return self._starts[-1]

    def find(self, index: int) -> tuple[int, int]:
        """(file, record in it) of a global index; IndexError outside the range."""
        if not 0 <= index < self._starts[-1]:
            raise IndexError(index)
        file = bisect_right(self._starts, index) - 1
        return file, index - self._starts[file]

    @property
    def fingerprint(self) -> str:
        """A hash of the count and of samples of the content of each file."""
        digest = hashlib.sha256()
        for path, count in zip(self.paths, self.counts, strict=True):
            digest.update(f"{count}:{self._sampled(path)}:".encode())
        return digest.hexdigest()[:16]

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened; objects are compared when they are read."""
        if self._place is None:
            for path, state in zip(self.paths, self._states, strict=True):
                require_unchanged(path, state)

    def _sampled(self, path: Path) -> str:
        """The hash of samples of a file: the same for an object and for a copy of it on a disk."""
        if self._place is None:
            return sampled_hash(path)
        file = self._place.open(str(path))
        return sampled_content(file.num_bytes, file.read_at)


def files_with(path: Path, *suffixes: str) -> list[Path]:
    """The file itself, or the files below a folder that end with one of the suffixes, sorted by name."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file())
    if not found:
        kinds = " or ".join(suffixes)
        raise DataError(f"there is no {kinds} file here", where=str(path), hint="check the path")
    return found
