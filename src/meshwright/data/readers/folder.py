"""Plain folders: files with one name and several endings are one record."""

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.readers.tar_format import Member, sample_name
from meshwright.data.records import KEY, Field, Record, RecordError
from meshwright.errors import DataError, read_trouble
from meshwright.files import read_bounded

FOLDER_FIELD = "folder"
_MAX_FILE_BYTES = 8 << 30


class FolderFiles:
    """`cats/17.jpg` and `cats/17.txt` are the record `cats/17` with the fields `jpg` and `txt`.

    The field `folder` is the name of the folder that a file is in, such as the class of an image. Hidden
    files are left out. Many small files are slow on every storage: `meshwright data index` reads tar shards.
    """

    def __init__(self, path: Path | str) -> None:
        self.name, self._root = str(path), Path(path)
        found: dict[str, dict[str, int]] = {}
        for name, num_bytes in _files_below(self._root):
            key_field = sample_name(Member(0, name, 0, num_bytes, is_regular=True))
            if key_field is not None:
                found.setdefault(key_field[0], {})[key_field[1]] = num_bytes
        self._records = sorted(found.items())
        if not self._records:
            raise DataError("the folder holds no file with an ending", where=self.name)

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of all files; their content is not read."""
        digest = hashlib.sha256()
        for key, sizes in self._records:
            digest.update(repr((key, sorted(sizes.items()))).encode())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Record:
        """The files of one name, as bytes."""
        key, sizes = self._records[index]
        record: dict[str, Field] = {KEY: key}
        if parent := os.path.dirname(key):
            record[FOLDER_FIELD] = os.path.basename(parent)
        for field, size in sorted(sizes.items()):
            record[field] = self._content(f"{key}.{field}", key, size)
        return record

    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each record."""
        return np.array([sum(sizes.values()) for _, sizes in self._records], dtype=np.int64)

    def require_unchanged(self) -> None:
        """Does nothing: each file is compared with its size when it is read."""

    def _content(self, name: str, key: str, num_bytes: int) -> bytes:
        path = self._root / name
        try:
            content = read_bounded(path, max_bytes=_MAX_FILE_BYTES)
        except OSError as error:
            raise RecordError(
                f"the file cannot be read: {read_trouble(error)}", file=str(path), key=key
            ) from None
        if len(content) != num_bytes:
            fact = f"the file has {len(content)} bytes, and had {num_bytes} when the folder was opened"
            raise RecordError(fact, file=str(path), key=key)
        return content


def _files_below(root: Path):
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield os.path.relpath(path, root), os.path.getsize(path)
