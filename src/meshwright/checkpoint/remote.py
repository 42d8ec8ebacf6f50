"""The second place of checkpoints: a folder of a shared file system, or a prefix of an object store.

Both have the layout of a run's own folder: `step-<n>/` with the files and, written last, the manifest. A step
without a manifest does not count.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from meshwright.checkpoint.save import MANIFEST
from meshwright.data.readers.object_store import Store, StoreOptions, is_address
from meshwright.errors import CheckpointError, DataError

_MANIFEST_OF_STEP = re.compile(rf"(step-\d{{8,}})/{re.escape(MANIFEST)}")
_CHUNK_BYTES = 64 << 20


class Remote(Protocol):
    """Files by names such as `step-00000010/index.json`; every failure is a CheckpointError."""

    def put(self, source: Path, name: str) -> None:
        """Copy a local file there; it appears complete or not at all."""
        ...

    def fetch(self, name: str, target: Path, num_bytes: int | None) -> None:
        """Copy a file from there; `num_bytes` is its size where it is known."""
        ...

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        ...

    def delete(self, step_name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        ...


def open_remote(address: str, options: StoreOptions | None = None) -> Remote:
    """The place at an address such as s3://bucket/run, or at a path."""
    return StoreRemote(address, options) if is_address(address) else FolderRemote(Path(address).expanduser())


class FolderRemote:
    """A folder, on another disk or a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, source: Path, name: str) -> None:
        """Copy beside the target, flush to the disk, rename."""
        target = self._root / name
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as reading, partial.open("wb") as writing:
                shutil.copyfileobj(reading, writing, _CHUNK_BYTES)
                writing.flush()
                os.fsync(writing.fileno())
            partial.replace(target)
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be copied: {error.strerror}", where=str(self._root)
            ) from None

    def fetch(self, name: str, target: Path, num_bytes: int | None) -> None:
        """Copy a file."""
        try:
            shutil.copyfile(self._root / name, target)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}", where=str(self._root)) from None

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return sorted(path.parent.name for path in self._root.glob(f"step-*/{MANIFEST}"))

    def delete(self, step_name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        folder = self._root / step_name
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            raise CheckpointError(
                f"{step_name} cannot be deleted: {error.strerror}", where=str(folder)
            ) from None


class StoreRemote:
    """A prefix of an object store. An object appears when all of it has arrived (multipart upload)."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        self._address = address.rstrip("/")
        self._store = Store(self._address, options)

    def put(self, source: Path, name: str) -> None:
        """Upload with retries; the size that the store reports afterwards is compared."""
        address, expected = f"{self._address}/{name}", source.stat().st_size
        try:
            self._store.put(source, address)
            found = self._store.info(address).num_bytes
        except DataError as error:
            raise _store_error(error, address) from None
        if found != expected:
            fact = f"the store has {found} of {expected} bytes of {name} after the upload"
            raise CheckpointError(fact, where=self._address)

    def fetch(self, name: str, target: Path, num_bytes: int | None) -> None:
        """Download in ranges with retries."""
        address = f"{self._address}/{name}"
        try:
            size = self._store.info(address).num_bytes if num_bytes is None else num_bytes
            with target.open("wb") as writing:
                for start in range(0, size, _CHUNK_BYTES):
                    writing.write(self._store.read(address, start, min(start + _CHUNK_BYTES, size)))
        except DataError as error:
            raise _store_error(error, address) from None

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        try:
            names = self._store.below(self._address)
        except DataError as error:
            if "no such object" in error.fact:
                return []
            raise _store_error(error, self._address) from None
        return sorted(found[1] for name in names if (found := _MANIFEST_OF_STEP.fullmatch(name)))

    def delete(self, step_name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        address = f"{self._address}/{step_name}"
        try:
            names = self._store.below(address)
            for name in sorted(names, key=lambda name: name != MANIFEST):
                self._store.remove(f"{address}/{name}")
        except DataError as error:
            raise _store_error(error, address) from None


def _store_error(error: DataError, address: str) -> CheckpointError:
    return CheckpointError(error.fact, where=address)
