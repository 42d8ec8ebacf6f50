"""The folder of a dataset, on a disk or in an object store, as one interface for readers."""

import hashlib
import os
import threading
from pathlib import Path
from typing import Protocol

from meshwright.data.file_check import FileState
from meshwright.data.readers.byte_files import ByteFile, LocalFile
from meshwright.data.readers.object_store import RemoteFile, Store, StoreOptions, is_address
from meshwright.data.records import RecordError

_COPY_CHUNK_BYTES = 16 << 20


class Place(Protocol):
    """The files below one folder, named by their paths relative to it."""

    @property
    def name(self) -> str:
        """Path or address."""
        ...

    @property
    def root(self) -> Path:
        """A local folder in which `fetch` puts small files: the folder itself, where it is local."""
        ...

    def fetch(self, name: str) -> Path:
        """The local path of a file, which is copied from the store where needed."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def state(self, name: str) -> FileState:
        """Size and version of a file."""
        ...

    def open(self, name: str) -> ByteFile:
        """The file for reads at any offset."""
        ...


class LocalPlace:
    """A folder on a disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, str(root)

    def fetch(self, name: str) -> Path:
        """The path of the file itself."""
        return self.root / name

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.root / name).is_file()

    def state(self, name: str) -> FileState:
        """Size, modification time and inode."""
        return FileState.of(self.root / name)

    def open(self, name: str) -> LocalFile:
        """The file for reads at any offset."""
        return LocalFile(self.root / name)


class RemotePlace:
    """A folder in an object store. Index files are copied to the local cache; shards are read in blocks."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        self.name = address.rstrip("/")
        self.store = Store(self.name, options)
        folder = hashlib.sha256(self.name.encode()).hexdigest()[:24]
        self.root = self.store.options.cache_folder / "copies" / folder
        self._states: dict[str, FileState] = {}

    def fetch(self, name: str) -> Path:
        """The local copy of a file; it is made once for each version of the object."""
        state = self.state(name)
        path = self.root / name
        mark = path.with_name(f".{path.name}.version")
        wanted = f"{state.num_bytes}-{state.modified_ns}"
        if path.is_file() and mark.is_file() and mark.read_text() == wanted:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        with partial.open("wb") as file:
            for start in range(0, state.num_bytes, _COPY_CHUNK_BYTES):
                end = min(start + _COPY_CHUNK_BYTES, state.num_bytes)
                file.write(self.store.read(self.address(name), start, end))
        partial.replace(path)
        mark.write_text(wanted)
        return path

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return name in self._states or self.store.exists(self.address(name))

    def state(self, name: str) -> FileState:
        """Size and version of the object when it was first asked for."""
        if name not in self._states:
            self._states[name] = self.store.info(self.address(name))
        return self._states[name]

    def open(self, name: str) -> RemoteFile:
        """The object for reads at any offset."""
        return RemoteFile(self.store, self.address(name), self.state(name))

    def address(self, name: str) -> str:
        """The full address of an object."""
        return f"{self.name}/{name}"


def place_at(path: Path | str, options: StoreOptions | None = None) -> Place:
    """The folder at a path or an address."""
    return RemotePlace(str(path), options) if is_address(str(path)) else LocalPlace(Path(path))


def fetch_all(place: RemotePlace, names: list[str]) -> Path:
    """Copy files into the local cache, up to its bound; returns the folder of the copies."""
    total = sum(place.state(name).num_bytes for name in names)
    bound = place.store.options.max_cache_bytes
    if total > bound:
        fact = f"the {len(names)} files have {total} bytes, and the local cache is bounded to {bound}"
        hint = "raise `max_cache_bytes`, or store the dataset as indexed tar shards, which are read in blocks"
        raise RecordError(fact, file=place.name, hint=hint)
    for name in names:
        place.fetch(name)
    return place.root
