"""The thread that writes checkpoints while training goes on.

A thread suffices: hashing and writing release the GIL. Its collectives are on a gloo group of its own, so
they never meet those of the training.
"""

import datetime
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CheckpointError

Write = Callable[[dist.ProcessGroup], Path]
"""Writes and publishes one checkpoint with the collectives of a group; returns its folder."""


class BackgroundWriter:
    """Writes one checkpoint at a time. All ranks construct it; communicates."""

    def __init__(self, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        timeout = datetime.timedelta(seconds=timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None
        self._error: CheckpointError | None = None
        self.write_seconds = 0.0
        """Time that the last write took."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of the write has ended."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, write: Write) -> None:
        """Start to write; the write before must have ended."""
        assert self.is_done
        self._folder = self._error = None
        # A daemon: a rank that fails does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def result(self) -> Path:
        """Wait for the write to end, and return the folder; CheckpointError where it failed."""
        if self._thread is not None:
            self._thread.join(self._timeout_seconds)
        if not self.is_done:
            raise CheckpointError(
                f"it was not written within {self._timeout_seconds:g} s",
                where="saving a checkpoint",
                hint="is the file system responding? resilience has the timeouts",
            )
        if self._error is not None:
            raise self._error
        assert self._folder is not None
        return self._folder

    def close(self) -> None:
        """Destroy the process group; the write must have ended on all ranks, which call this together."""
        dist.destroy_process_group(self._group)

    def _run(self, write: Write) -> None:
        started_at = time.perf_counter()
        try:
            self._folder = write(self._group)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a lost rank, for one: the training must hear of it, not this thread
            self._error = CheckpointError(
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", where="saving a checkpoint"
            )
        self.write_seconds = time.perf_counter() - started_at
