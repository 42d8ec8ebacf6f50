"""Files that are read at any offset: on a local disk (mapped or read), or in an object store."""

import io
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

from meshwright.data.file_check import FileState, damaged, require_unchanged
from meshwright.data.records import RecordError
from meshwright.errors import read_trouble
from meshwright.files import regular_file


class ByteFile(Protocol):
    """A file that several threads may read at any offset at once."""

    @property
    def name(self) -> str:
        """Path or address."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size when it was opened."""
        ...

    @property
    def version(self) -> str:
        """A text that changes when the content is replaced: modification time, or the ETag of an object."""
        ...

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on; RecordError where the file ends before."""
        ...

    def require_unchanged(self) -> None:
        """DataError where the file was changed since it was opened."""
        ...


class LocalFile:
    """A file on a disk, read with `pread`: cold data costs exactly the bytes that were asked for."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.state = FileState.of(self.path)
        self.num_bytes = self.state.num_bytes
        self.version = f"{self.state.num_bytes}-{self.state.modified_ns}"
        self._opened = _Descriptor(self.path)

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on; RecordError where the file ends before."""
        content = os.pread(self._opened.number, count, offset)
        while len(content) < count:  # a signal, or 2 GiB in one call
            more = os.pread(self._opened.number, count - len(content), offset + len(content))
            if not more:
                raise RecordError(
                    f"the file ends after {self.num_bytes} bytes", file=self.name, offset=offset
                )
            content += more
        return content

    def mapped(self) -> mmap.mmap:
        """The file as a memory map: the fastest way to data that stays in the page cache."""
        return mmap.mmap(self._opened.number, 0, access=mmap.ACCESS_READ)

    def require_unchanged(self) -> None:
        """DataError where the file was changed since it was opened."""
        require_unchanged(self.path, self.state)

    def __reduce__(self) -> tuple[object, ...]:
        """Worker processes open the file themselves."""
        return LocalFile, (self.name,)


class ByteStream(io.RawIOBase):
    """A ByteFile as a stream that seeks, for libraries that read from one: only what they read is fetched."""

    def __init__(self, file: ByteFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start, from here or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.num_bytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, all that are left where it is negative; fewer only at the end of the file."""
        left = max(0, self._file.num_bytes - self._at)
        count = left if size < 0 else min(size, left)
        content = self._file.read_at(self._at, count) if count else b""
        self._at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns the bytes read."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class _Descriptor:
    """An open file, closed with the last reader of it."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        try:
            with regular_file(path) as stream:
                self.number = os.dup(stream.fileno())
        except OSError as error:
            raise damaged(path, f"the file cannot be read: {read_trouble(error)}") from None

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
