"""Reads boxes of tensors from the shard files of a checkpoint; what is used is verified just before.

Two threads read the chunks that are needed next and compare them with the manifest. The boxes are then copied
from a memory map of the same pages, so that each byte comes from the disk once. The safetensors package
checks the header. Nothing in a shard file is ever executed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.digest import DamagedCheckpoint, VerifiedFile, require_size

_NUM_THREADS = 2
_NUM_AHEAD = 8
"""Chunks that are read before they are needed; more of them could push each other out of the page cache."""
_LENGTH_BYTES = 8

Chunk = tuple[str, int]
"""A shard file, and the number of one of its chunks."""


class BoxPart(NamedTuple):
    """Slices of one saved box, which is a tensor in one shard file, and what they are read into."""

    file: str
    name: str
    slices: tuple[slice, ...]
    target: Tensor


class ShardFiles:
    """Open shard files of one checkpoint; use as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def in_order(self, parts: Iterable[BoxPart]) -> list[BoxPart]:
        """The parts in the order in which they are to be read."""
        return sorted(parts, key=lambda part: (part.file, part.name))

    def read(self, part: BoxPart) -> Tensor:
        """A box of one tensor of one file; only its rows are read from the disk."""
        with _damage_of(part, self._folder):
            if part.file not in self._open:
                self._open[part.file] = safe_open(self._folder / part.file, framework="pt")
            # A view of the memory map; `get_slice` would copy the part before it is copied into its target.
            found = self._open[part.file].get_tensor(part.name)[part.slices]
            if found.shape != part.target.shape:
                raise ValueError(f"its shape is {tuple(found.shape)}, not {tuple(part.target.shape)}")
            return found


class VerifiedShardFiles(ShardFiles):
    """Shard files of which all that is read is first compared with the manifest.

    `in_order` is called once, with all parts; then each of them is read, in this order.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(folder)
        self._entries = entries
        self._files: dict[str, VerifiedFile] = {}
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "verify")
        self._sequence: list[Chunk] = []
        self._order: dict[Chunk, int] = {}
        self._started: list[Future[None]] = []

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def in_order(self, parts: Iterable[BoxPart]) -> list[BoxPart]:
        """The parts in the order of their bytes; their chunks are verified in this order."""
        ordered = sorted(parts, key=lambda part: (part.file, self._byte_range(part)))
        chunks = dict.fromkeys(chunk for part in ordered for chunk in self._chunks(part))
        self._sequence = list(chunks)
        self._order = {chunk: number for number, chunk in enumerate(chunks)}
        return ordered

    def read(self, part: BoxPart) -> Tensor:
        """A box of one tensor of one file, verified."""
        numbers = [self._order[chunk] for chunk in self._chunks(part)]
        self._start_until(max(numbers, default=-1) + _NUM_AHEAD)
        for number in numbers:
            self._started[number].result()
        return super().read(part)

    def _start_until(self, number: int) -> None:
        for file, chunk in self._sequence[len(self._started) : number + 1]:
            self._started.append(self._threads.submit(self._files[file].verify, chunk))

    def _chunks(self, part: BoxPart) -> list[Chunk]:
        return [(part.file, number) for number in self._files[part.file].chunks(*self._byte_range(part))]

    def _byte_range(self, part: BoxPart) -> tuple[int, int]:
        """The bytes of the file that have the rows of this part."""
        with _damage_of(part, self._folder):
            header, data_begin = self._header(part.file)
            entry = header[part.name]
            begin, end = (data_begin + offset for offset in entry["data_offsets"])
            if not 0 <= begin <= end <= self._entries[part.file]["bytes"]:
                raise ValueError("its bytes are outside of the file")
            if not part.slices:
                return begin, end
            row_bytes = (end - begin) // max(1, entry["shape"][0])
            return begin + part.slices[0].start * row_bytes, begin + part.slices[0].stop * row_bytes

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        """The verified header of a file, and where its data begins."""
        if file not in self._headers:
            entry, path = self._entries[file], self._folder / file
            require_size(path, entry)
            verified = self._files[file] = VerifiedFile(path, entry)
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                end = _LENGTH_BYTES + length
                if end > entry["bytes"]:
                    raise ValueError("its header is longer than the file")
                for chunk in verified.chunks(0, end):
                    verified.verify(chunk)
                self._headers[file] = json.loads(stream.read(length)), end
        return self._headers[file]


@contextmanager
def _damage_of(part: BoxPart, folder: Path) -> Iterator[None]:
    """Inside, everything that a damaged file can raise is one error."""
    try:
        yield
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"tensor {part.name} cannot be read: {error}",
            where=str(folder / part.file),
            hint="use an older checkpoint: this one is damaged",
        ) from None
