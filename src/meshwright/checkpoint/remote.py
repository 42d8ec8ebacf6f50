"""The second place of checkpoints: a folder of a shared file system, or a prefix of an object store.

    folder:  step-<n>/ with the files and the manifest, renamed from a hidden folder when it is complete
    store:   step-<n>/<upload>/ with the files, and step-<n>/manifest.json, which names the upload

Every upload has a place of its own, so two writers never mix their files. The manifest is last, and a step
without one does not count. It is published only where the step is as this process has found or left it: of
two writers of one step, the second is refused.
"""

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.checkpoint.chunk_read import is_intact
from meshwright.checkpoint.digest import matches_entry
from meshwright.checkpoint.save import MANIFEST, PARTIAL, REPLACED
from meshwright.data.readers.object_store import Store, StoreOptions, is_address
from meshwright.errors import CheckpointError, DataError

_MANIFEST_OF_STEP = re.compile(rf"(step-\d{{8,}})/{re.escape(MANIFEST)}")
_STEP_NAME = re.compile(r"step-\d{8,}")
_NEWEST = "newest.json"
_UPLOAD = "upload"
"""The key of a manifest in a store that names the folder of its files."""
_CHUNK_BYTES = 64 << 20
_NUM_ATTEMPTS = 3
"""Uploads of a file that is not there as it was sent."""


class Remote(Protocol):
    """Complete checkpoints in another place; every failure is a CheckpointError.

    One process of a run calls `begin`, `publish`, `complete` and `delete`; all ranks call the others.
    """

    def begin(self, step_name: str) -> str:
        """The place of a new upload. Refused where another writer has published the step."""
        ...

    def put(self, source: Path, place: str, entry: Mapping[str, Any]) -> None:
        """Copy a local file there, and read it back: it is what the manifest's entry says."""
        ...

    def publish(self, manifest: Path, step_name: str, place: str) -> None:
        """Make an upload count. Refused where another writer has published the step since."""
        ...

    def fetch(self, step_name: str, manifest: Mapping[str, Any], file: str, target: Path) -> None:
        """Copy a file of a published checkpoint from there."""
        ...

    def fetch_manifest(self, step_name: str, target: Path) -> None:
        """Copy the manifest of a published checkpoint from there."""
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


def _conflict(step_name: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"another writer has published {step_name} there since this run started",
        where=where,
        hint="end the other run, or give each run a checkpoint.upload.destination of its own",
    )


def _not_stored(file: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{file} does not read back as it was written, in {_NUM_ATTEMPTS} uploads",
        where=where,
        hint="the storage loses or changes data; the checkpoint in the run directory is kept",
    )


class FolderRemote:
    """A folder, on another disk or a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: set[str] | None = None
        """Steps that were there at the start, or that this process has published."""

    def begin(self, step_name: str) -> str:
        """A hidden folder; leftovers of uploads of the same step are deleted."""
        self._require_known(step_name)
        place = f"{PARTIAL}{step_name}-{uuid.uuid4().hex[:12]}"
        try:
            for leftover in self._root.glob(f"{PARTIAL}{step_name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            (self._root / place).mkdir(parents=True)
        except OSError as error:
            raise self._error(f"{step_name} cannot be copied", error) from None
        return place

    def put(self, source: Path, place: str, entry: Mapping[str, Any]) -> None:
        """Copy, flush to the disk, read back from the disk."""
        target = self._root / place / source.name
        for _ in range(_NUM_ATTEMPTS):
            self._copy(source, target)
            if is_intact(target, entry, is_direct=True):
                return
        raise _not_stored(source.name, str(self._root))

    def publish(self, manifest: Path, step_name: str, place: str) -> None:
        """Rename the folder; only a known one of that name is replaced."""
        self._require_known(step_name)
        self._copy(manifest, self._root / place / MANIFEST)
        target, replaced = self._root / step_name, self._root / f"{REPLACED}{step_name}"
        try:
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                target.rename(replaced)
            try:
                (self._root / place).rename(target)  # refused where a folder with files has appeared
            except OSError:
                if (target / MANIFEST).is_file():
                    raise _conflict(step_name, str(self._root)) from None
                raise
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise self._error(f"{step_name} cannot be published", error) from None
        self._known_steps().add(step_name)

    def fetch(self, step_name: str, manifest: Mapping[str, Any], file: str, target: Path) -> None:
        """Copy a file."""
        try:
            shutil.copyfile(self._root / step_name / file, target)
        except OSError as error:
            raise self._error(f"{step_name}/{file} cannot be read", error) from None

    def fetch_manifest(self, step_name: str, target: Path) -> None:
        """Copy the manifest."""
        self.fetch(step_name, {}, MANIFEST, target)

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        self._known_steps()
        return self._found()

    def delete(self, step_name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        folder = self._root / step_name
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            raise self._error(f"{step_name} cannot be deleted", error) from None
        self._known_steps().discard(step_name)

    def _found(self) -> list[str]:
        return sorted(path.parent.name for path in self._root.glob(f"step-*/{MANIFEST}"))

    def _known_steps(self) -> set[str]:
        if self._known is None:
            self._known = set(self._found())
        return self._known

    def _require_known(self, step_name: str) -> None:
        if step_name not in self._known_steps() and (self._root / step_name / MANIFEST).is_file():
            raise _conflict(step_name, str(self._root))

    def _copy(self, source: Path, target: Path) -> None:
        try:
            with source.open("rb") as reading, target.open("wb") as writing:
                shutil.copyfileobj(reading, writing, _CHUNK_BYTES)
                writing.flush()
                os.fsync(writing.fileno())
        except OSError as error:
            raise self._error(f"{source.name} cannot be copied", error) from None

    def _error(self, fact: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"{fact}: {error.strerror}", where=str(self._root))


class StoreRemote:
    """A prefix of an object store. An object appears when all of it has arrived (multipart upload)."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        self._address = address.rstrip("/")
        self._store = Store(self._address, options)
        self._known: dict[str, str | None] | None = None
        """Versions of the manifests that were there at the start, or that this process has published."""

    def begin(self, step_name: str) -> str:
        """A new prefix below the step."""
        with _StoreErrors(self._address):
            if self._store.version(self._manifest(step_name)) != self._known_versions().get(step_name):
                raise _conflict(step_name, self._address)
        return f"{step_name}/{uuid.uuid4().hex[:12]}"

    def put(self, source: Path, place: str, entry: Mapping[str, Any]) -> None:
        """Upload with retries, and read it back."""
        address = f"{self._address}/{place}/{source.name}"
        with _StoreErrors(address):
            for attempt in range(_NUM_ATTEMPTS):
                self._store.put(source, address)
                if self._is_stored(address, entry):
                    return
                time.sleep(0.1 * 2**attempt)
        raise _not_stored(source.name, self._address)

    def publish(self, manifest: Path, step_name: str, place: str) -> None:
        """Store the manifest, on the condition that nobody else has."""
        address, versions = self._manifest(step_name), self._known_versions()
        upload = place.removeprefix(f"{step_name}/")
        content = json.dumps({**json.loads(manifest.read_text()), _UPLOAD: upload}, indent=1).encode()
        with _StoreErrors(address):
            is_ours = self._store.put_if_unchanged(content, address, versions.get(step_name))
            # An answer that was lost made us ask twice: what is there decides.
            if not is_ours and not self._reads_back(address, content):
                raise _conflict(step_name, self._address)
            if not self._reads_back(address, content):
                raise _not_stored(MANIFEST, self._address)
            versions[step_name] = self._store.version(address)
            newest = json.dumps({"step": step_name}).encode()
            self._store.put_bytes(newest, f"{self._address}/{_NEWEST}")
            self._delete_below(step_name, but=upload)

    def fetch(self, step_name: str, manifest: Mapping[str, Any], file: str, target: Path) -> None:
        """Download in ranges with retries."""
        upload, size = manifest.get(_UPLOAD), manifest["files"][file]["bytes"]
        folder = f"{step_name}/{upload}" if isinstance(upload, str) else step_name
        self._download(f"{self._address}/{folder}/{file}", size, target)

    def fetch_manifest(self, step_name: str, target: Path) -> None:
        """Download the manifest."""
        with _StoreErrors(self._address):
            size = self._store.info(self._manifest(step_name)).num_bytes
        self._download(self._manifest(step_name), size, target)

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        with _StoreErrors(self._address):
            self._known_versions()
            return self._found()

    def delete(self, step_name: str) -> None:
        """Delete one checkpoint, its manifest first."""
        with _StoreErrors(self._address):
            self._delete_below(step_name)
            self._known_versions().pop(step_name, None)

    def _manifest(self, step_name: str) -> str:
        return f"{self._address}/{step_name}/{MANIFEST}"

    def _found(self) -> list[str]:
        """The steps of the listing, and the newest that was published: a listing may be out of date."""
        names = self._below(self._address)
        found = {match[1] for name in names if (match := _MANIFEST_OF_STEP.fullmatch(name))}
        newest = self._newest()
        if newest is not None and newest not in found and self._store.version(self._manifest(newest)):
            found.add(newest)
        return sorted(found)

    def _below(self, address: str) -> list[str]:
        try:
            return self._store.below(address)
        except DataError as error:
            if "no such object" in error.fact:
                return []
            raise

    def _newest(self) -> str | None:
        address = f"{self._address}/{_NEWEST}"
        if self._store.version(address) is None:
            return None
        try:
            size = self._store.info(address).num_bytes
            step = json.loads(self._store.read(address, 0, min(size, 1000)))["step"]
        except (ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, str) and _STEP_NAME.fullmatch(step) else None

    def _known_versions(self) -> dict[str, str | None]:
        if self._known is None:
            self._known = {name: self._store.version(self._manifest(name)) for name in self._found()}
        return self._known

    def _is_stored(self, address: str, entry: Mapping[str, Any]) -> bool:
        if self._store.info(address).num_bytes != entry["bytes"]:
            return False
        return matches_entry(entry, lambda begin, end: self._store.read(address, begin, end))

    def _reads_back(self, address: str, content: bytes) -> bool:
        size = self._store.info(address).num_bytes
        return size == len(content) and self._store.read(address, 0, size) == content

    def _delete_below(self, step_name: str, *, but: str | None = None) -> None:
        """Delete the objects of a step, its manifest first; with `but` only those of other uploads."""
        address = f"{self._address}/{step_name}"
        for name in sorted(self._below(address), key=lambda name: name != MANIFEST):
            if but is None or (name != MANIFEST and not name.startswith(f"{but}/")):
                self._store.remove(f"{address}/{name}")

    def _download(self, address: str, num_bytes: int, target: Path) -> None:
        with _StoreErrors(address), target.open("wb") as writing:
            for start in range(0, num_bytes, _CHUNK_BYTES):
                writing.write(self._store.read(address, start, min(start + _CHUNK_BYTES, num_bytes)))


class _StoreErrors:
    """A context in which errors of the store are errors of a checkpoint."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError):
            raise CheckpointError(error.fact, where=self._where) from None
