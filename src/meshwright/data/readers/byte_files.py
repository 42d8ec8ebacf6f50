"""Files that are read at any offset: on a local disk (mapped or read), or in an object store."""

import mmap
import os
from pathlib import Path
from typing import Protocol

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
