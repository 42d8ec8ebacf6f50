"""Objects in S3 and other stores, through fsspec: ranged reads, a bounded cache of blocks, and retries.

Blocks are kept as files in a local folder, so they survive a restart and are shared by the processes of a
node. A block file appears under its name when it is complete. The oldest ones are removed above the bound.
"""

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshwright.data.file_check import FileState
from meshwright.data.readers.extras import package
from meshwright.data.records import RecordError
from meshwright.errors import DataError

Result = TypeVar("Result")
_CACHE_VARIABLE = "MESHWRIGHT_CACHE"
_SECONDS_BETWEEN_CHECKS = 60.0
# Names of the timeouts in the client of S3; its own retries are off, so that there is one place for them.
_S3_CONFIG = {"connect_timeout": 10, "retries": {"max_attempts": 0}}

_NO_OBJECT = "there is no such object"
_OTHER_VERSION_CODES = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NO_CONDITION_CODES = ("NotImplemented", "501")


@dataclass(frozen=True)
class StoreOptions:
    """How objects are read."""

    cache_folder: Path = field(default_factory=lambda: default_cache())
    max_cache_bytes: int = 20 << 30
    """Bound of all cached blocks together; 0 reads exactly what is asked for and keeps nothing."""
    block_bytes: int = 4 << 20
    """Bytes that are fetched at once. Shuffle by blocks, so that one serves many records."""
    max_attempts: int = 6
    first_pause_seconds: float = 0.2
    """Pause after the first failure; it doubles each time, with a random half so that ranks spread out."""
    read_timeout_seconds: float = 30.0
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the fsspec filesystem, such as `endpoint_url`."""


def default_cache() -> Path:
    """The folder of cached blocks: `$MESHWRIGHT_CACHE`, or in the user's cache folder."""
    named = os.environ.get(_CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "meshwright"


def is_address(path: str) -> bool:
    """Whether a path is an address of an object store, such as s3://bucket/folder."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.isalnum() and scheme != "file"


class Store:
    """An object store; one for each process, because its connections do not survive a fork."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        self.address, self.options = address, options or StoreOptions()
        self._opened_by, self._system = 0, None

    def info(self, address: str) -> FileState:
        """Size and version (ETag) of an object; DataError where there is none."""
        found = self.attempt(address, lambda: self._filesystem().info(address))
        version = str(
            found.get("ETag") or found.get("etag") or found.get("LastModified") or found.get("mtime")
        )
        number = int.from_bytes(hashlib.sha256(version.encode()).digest()[:7], "big")
        return FileState(int(found["size"]), number, 0)

    def exists(self, address: str) -> bool:
        """Whether there is an object."""
        return bool(self.attempt(address, lambda: self._filesystem().exists(address)))

    def below(self, address: str) -> list[str]:
        """The paths of all objects below a folder, relative to it, sorted."""
        root = self._filesystem()._strip_protocol(address).rstrip("/") + "/"
        found = self.attempt(address, lambda: self._filesystem().find(address))
        return sorted(name.removeprefix(root) for name in found)

    def read(self, address: str, start: int, end: int) -> bytes:
        """Exactly the bytes from `start` to `end`; a short answer is tried again, then it is an error."""

        def once() -> bytes:
            content = self._filesystem().cat_file(address, start=start, end=end)
            if len(content) != end - start:
                raise _ShortAnswer(f"{len(content)} of {end - start} bytes came")
            return content

        return self.attempt(address, once, offset=start)

    def put(self, source: Path, address: str) -> None:
        """Upload a local file; large ones in several parts, and the object appears when all have arrived."""
        self.attempt(address, lambda: self._filesystem().put_file(str(source), address))

    def put_bytes(self, content: bytes, address: str) -> None:
        """Upload a small object."""
        self.attempt(address, lambda: self._filesystem().pipe_file(address, content))

    def version(self, address: str) -> str | None:
        """The version (ETag) of an object, as the store writes it; None where there is no object."""
        try:
            found = self.attempt(address, lambda: self._filesystem().info(address))
        except DataError as error:
            if error.fact == _NO_OBJECT:
                return None
            raise
        return str(found.get("ETag") or found.get("etag") or found.get("LastModified") or found.get("mtime"))

    def put_if_unchanged(self, content: bytes, address: str, replaced: str | None) -> bool:
        """Store an object in place of the version `replaced` (None: where there is none); False otherwise.

        S3 compares and stores in one request (If-Match, If-None-Match). Stores that know no conditions are
        asked for the version just before.
        """
        condition = {"IfMatch": replaced} if replaced is not None else {"IfNoneMatch": "*"}

        def once() -> bool:
            system = self._filesystem()
            if not hasattr(system, "call_s3"):
                return self._put_after_check(content, address, replaced)
            bucket, key, _ = system.split_path(address)
            try:
                system.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)
            except Exception as error:
                code = _error_code(error)
                if code in _OTHER_VERSION_CODES:
                    return False
                if code not in _NO_CONDITION_CODES:
                    raise
                return self._put_after_check(content, address, replaced)
            return True

        return self.attempt(address, once)

    def _put_after_check(self, content: bytes, address: str, replaced: str | None) -> bool:
        if self.version(address) != replaced:
            return False
        self._filesystem().pipe_file(address, content)
        return True

    def remove(self, address: str) -> None:
        """Delete one object."""
        self.attempt(address, lambda: self._filesystem().rm_file(address))

    def attempt(self, address: str, call: Callable[[], Result], offset: int | None = None) -> Result:
        """The result of a call, repeated with growing pauses; RecordError after the last attempt."""
        pause = self.options.first_pause_seconds
        for left in reversed(range(self.options.max_attempts)):
            try:
                return call()
            except FileNotFoundError:
                hint = "check the address, and the endpoint and credentials of the store"
                raise DataError(_NO_OBJECT, where=address, hint=hint) from None
            except PermissionError as error:
                hint = "check the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3"
                raise DataError(f"access is denied ({error})", where=address, hint=hint) from None
            except Exception as error:  # every store has errors of its own
                if left == 0 or isinstance(error, DataError):
                    fact = f"the object store failed {self.options.max_attempts} times: {_short(error)}"
                    raise RecordError(fact, file=address, offset=offset) from error
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _filesystem(self) -> Any:
        if self._system is None or self._opened_by != os.getpid():
            self._system, self._opened_by = _connect(self.address, self.options), os.getpid()
        return self._system

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.address, self.options)


class RemoteFile:
    """An object that is read at any offset, through the cache of blocks."""

    def __init__(self, store: Store, address: str, state: FileState | None = None) -> None:
        self.name, self._store = address, store
        self.state = state or store.info(address)
        self.num_bytes = self.state.num_bytes
        self.version = f"{self.state.num_bytes}-{self.state.modified_ns}"
        self._checked_at = time.monotonic()
        self._cache = BlockCache(store.options)

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on; RecordError where the object ends before."""
        if offset + count > self.num_bytes:
            raise RecordError(f"the object ends after {self.num_bytes} bytes", file=self.name, offset=offset)
        size = self._store.options.block_bytes
        if not self._store.options.max_cache_bytes:
            return self._store.read(self.name, offset, offset + count)
        first, last = offset // size, max(offset, offset + count - 1) // size
        joined = b"".join(self._block(number, size) for number in range(first, last + 1))
        return joined[offset - first * size : offset - first * size + count]

    def require_unchanged(self) -> None:
        """DataError where the object was replaced since it was opened; it is asked once a minute."""
        if time.monotonic() - self._checked_at > _SECONDS_BETWEEN_CHECKS:
            self._checked_at = time.monotonic()
            if self._store.info(self.name) != self.state:
                hint = "index the shards again: `meshwright data index`"
                raise DataError("the object was replaced while it was in use", where=self.name, hint=hint)

    def _block(self, number: int, size: int) -> bytes:
        start, end = number * size, min((number + 1) * size, self.num_bytes)
        key = f"{self.name}\n{self.version}\n{size}\n{number}"
        return self._cache.get(key, end - start, lambda: self._store.read(self.name, start, end))


class BlockCache:
    """Blocks as files in a folder, bounded in bytes."""

    def __init__(self, options: StoreOptions) -> None:
        self._folder, self._max_bytes = options.cache_folder / "blocks", options.max_cache_bytes
        self._lock = threading.Lock()
        self._written_bytes = 0

    def get(self, key: str, num_bytes: int, fetch: Callable[[], bytes]) -> bytes:
        """The block of a key; it is fetched and kept where it is missing or was cut off."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            if len(content) == num_bytes:
                return content
        except OSError:
            pass
        content = fetch()
        self._keep(path, content)
        return content

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self._folder / name[:2] / name

    def _keep(self, path: Path, content: bytes) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:  # a full disk costs speed, not the run
            partial.unlink(missing_ok=True)
            return
        with self._lock:
            self._written_bytes += len(content)
            if self._written_bytes > self._max_bytes // 10:
                self._written_bytes = 0
                self.trim()

    def trim(self) -> None:
        """Remove the blocks written first until the rest is below the bound."""
        found = []
        for path in self._folder.glob("*/*"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process removed it
            found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self._max_bytes * 9 // 10
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _error_code(error: BaseException) -> str:
    """The code in an answer of S3, which the client wraps in errors of Python; empty where there is none."""
    found: BaseException | None = error
    while found is not None:
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        found = found.__cause__ or found.__context__
    return ""


class _ShortAnswer(Exception):
    """The store sent fewer bytes than it was asked for."""


def _connect(address: str, options: StoreOptions) -> Any:
    fsspec = package("fsspec", extra="s3", needed_for="object stores")
    scheme = address.partition("://")[0]
    settings = dict(options.settings)
    if scheme in ("s3", "s3a"):
        package("s3fs", extra="s3", needed_for="S3 addresses")
        config = {**_S3_CONFIG, "read_timeout": options.read_timeout_seconds}
        settings = {"config_kwargs": config, "use_listings_cache": False, **settings}
    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True, **settings)
    except (ImportError, ValueError) as error:
        raise DataError(f"addresses of {scheme}:// cannot be opened: {error}", where=address) from None


def _short(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}"[:200]
