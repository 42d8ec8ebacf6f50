"""LMDB databases: records in the order of their keys, with the value as bytes."""

import hashlib
import os
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from meshwright.data.file_check import FileState, require_unchanged, sampled_hash
from meshwright.data.readers.extras import package
from meshwright.data.records import KEY, Record, RecordError
from meshwright.errors import DataError

DATA_FILE = "data.mdb"
# Entries that writers add about the database itself; some of them are pickled, which is never loaded.
_ABOUT_THE_DATABASE = (b"__len__", b"__keys__", b"__meta__", b"length", b"num-samples")


class LmdbRecords:
    """The entries of a database: the field `value`, as bytes, and the key.

    LMDB has no access by number, so opening reads all keys: about a second for a million of them.
    """

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        self._path = Path(path)
        self._file = self._path / DATA_FILE if self._path.is_dir() else self._path
        self._state = FileState.of(self._file)
        self._environment = _Environment.of(self._path)
        with self._begin() as transaction:
            keys = (bytes(key) for key in transaction.cursor().iternext(keys=True, values=False))
            self._keys = [key for key in keys if key not in _ABOUT_THE_DATABASE]
        if not self._keys:
            raise DataError("the database has no entry", where=self.name)

    @property
    def fingerprint(self) -> str:
        """A hash of all keys and of samples of the file."""
        digest = hashlib.sha256(sampled_hash(self._file).encode())
        for key in self._keys:
            digest.update(key + b"\0")
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._keys)

    def record(self, index: int) -> Record:
        """The entry at `index` in the order of keys."""
        key = self._keys[index]
        with self._begin() as transaction:
            value = transaction.get(key)
        if value is None:
            raise RecordError("the entry is missing", file=self.name, key=repr(key))
        return {KEY: key.decode(errors="backslashreplace"), "value": bytes(value)}

    def lengths(self) -> NDArray[np.int64] | None:
        """None: the size of a value is not known without looking it up."""
        return None

    def require_unchanged(self) -> None:
        """DataError where the database was changed since it was opened."""
        require_unchanged(self._file, self._state)

    def _begin(self) -> Any:
        if self._environment.process_id != os.getpid():  # a database must not be used after a fork
            self._environment = _Environment.of(self._path)
        return self._environment.opened.begin(buffers=True)

    def __reduce__(self) -> tuple[object, ...]:
        return LmdbRecords, (self.name,)


class _Environment:
    """An open database. LMDB allows one per process and path, so readers of one path share it."""

    _open: ClassVar[WeakValueDictionary[tuple[int, Path], "_Environment"]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.process_id, self.opened = os.getpid(), _open(path)

    @staticmethod
    def of(path: Path) -> "_Environment":
        """The database of this process at a path."""
        key = (os.getpid(), path.resolve())
        found = _Environment._open.get(key)
        if found is None:
            found = _Environment._open[key] = _Environment(path)
        return found


def _open(path: Path) -> Any:
    lmdb = package("lmdb", extra="lmdb", needed_for="LMDB databases")
    try:
        return lmdb.open(
            str(path),
            readonly=True,
            lock=False,
            readahead=False,
            create=False,
            subdir=path.is_dir(),
            max_readers=512,
        )
    except lmdb.Error as error:
        fact = f"the database cannot be opened: {error}"
        raise DataError(
            fact, where=str(path), hint="copy it again; it must be complete and readable"
        ) from None
