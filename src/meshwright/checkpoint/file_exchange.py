"""Copies files between nodes over a process group, in chunks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.host_bytes import bytes_of

_CHUNK_BYTES = 16 << 20
_NUM_AT_A_TIME = 8
"""Files that are copied at the same time, of all ranks: it bounds the buffers of a rank."""


@dataclass(frozen=True)
class FileCopy:
    """One file that goes from the folder of one rank to that of another."""

    file: str
    num_bytes: int
    source: int
    target: int


def exchange_files(copies: Sequence[FileCopy], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Copy files; all ranks call it with the same list. Communicates.

    Each rank sends from and receives into its own `folder`. A received file gets its name when it is complete
    and flushed. OSError on the ranks whose disk failed; the others finish.
    """
    failures: list[OSError] = []
    for begin in range(0, len(copies), _NUM_AT_A_TIME):
        failures += _exchange(copies[begin : begin + _NUM_AT_A_TIME], folder, group)
    if failures:
        raise failures[0]


def _exchange(copies: Sequence[FileCopy], folder: Path, group: dist.ProcessGroup | None) -> list[OSError]:
    rank = dist.get_rank()
    mine = {tag: copy for tag, copy in enumerate(copies) if rank in (copy.source, copy.target)}
    ends = [_CopyEnd(copy, tag, folder) for tag, copy in mine.items()]
    longest = max((end.copy.num_bytes for end in ends), default=0)
    for begin in range(0, longest, _CHUNK_BYTES):
        # Every rank posts all of its sends and receives of a chunk before it waits: no order can deadlock.
        posted = [(end, *end.post(begin, group)) for end in ends if begin < end.copy.num_bytes]
        for end, buffer, work in posted:
            work.wait()
            end.received(buffer)
    for end in ends:
        end.close()
    return [end.failure for end in ends if end.failure is not None]


class _CopyEnd:
    """The sending or the receiving end of one copy. A failure is kept for the end: the peer must not wait."""

    def __init__(self, copy: FileCopy, tag: int, folder: Path) -> None:
        self.copy, self._tag, self._path = copy, tag, folder / copy.file
        self._is_source = dist.get_rank() == copy.source
        self._partial = self._path.with_name(f".{copy.file}.partial")
        self._file: BinaryIO | None = None
        self.failure: OSError | None = None
        with self._kept():
            self._file = self._path.open("rb") if self._is_source else self._partial.open("wb")

    def post(self, begin: int, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work]:
        """Start to send or to receive the next chunk."""
        buffer = torch.zeros(min(_CHUNK_BYTES, self.copy.num_bytes - begin), dtype=torch.uint8, device="cpu")
        if not self._is_source:
            work = dist.irecv(buffer, self.copy.source, group=group, tag=self._tag)
        else:
            with self._kept():
                if self._file is not None:
                    self._file.readinto(bytes_of(buffer))  # pyright: ignore[reportAttributeAccessIssue]
            work = dist.isend(buffer, self.copy.target, group=group, tag=self._tag)
        assert work is not None, "every rank is in the group"
        return buffer, work

    def received(self, buffer: Tensor) -> None:
        """Write a chunk that has arrived; nothing at the sending end."""
        with self._kept():
            if self._file is not None and not self._is_source and self.failure is None:
                self._file.write(bytes_of(buffer))

    def close(self) -> None:
        """Close the file; one that was received completely gets its name."""
        if self._file is None:
            return
        with self._kept(), self._file:
            if not self._is_source and self.failure is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self._path)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
