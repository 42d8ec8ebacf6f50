"""Copies of a run's checkpoints in a second place (`checkpoint.upload`), made by a thread of their own.

A slow or failing store holds up neither training nor the saves into the run directory: while one copy is
made, only the newest other checkpoint waits, and older ones are left out.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.agree import on_all_ranks_alike
from meshwright.checkpoint.remote import open_remote
from meshwright.checkpoint.retain import delete_checkpoint
from meshwright.checkpoint.transfer import upload_checkpoint
from meshwright.checkpoint.writer import BackgroundWriter
from meshwright.errors import CheckpointError
from meshwright.spec.checkpoint import UploadSpec

_FIRST_PAUSE_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 600.0


@dataclass(frozen=True)
class UploadOutcome:
    """How the copy of one checkpoint ended."""

    step_name: str
    error: CheckpointError | None
    """Why it failed; None where it is complete."""
    seconds: float


class Uploader:
    """Copies published checkpoints; every method is called by all ranks at the same step."""

    def __init__(self, spec: UploadSpec, *, timeout_seconds: float) -> None:
        self.spec, self.remote = spec, open_remote(spec.destination)
        self._timeout_seconds = timeout_seconds
        self._writer: BackgroundWriter | None = None
        self._current: Path | None = None
        self._waiting: Path | None = None
        self._num_failures, self._retry_at = 0, 0.0
        self.uploaded: str | None = None
        """Name of the last checkpoint that was copied."""

    @property
    def needed(self) -> set[Path]:
        """Checkpoints that are copied now or next, and must not be deleted."""
        return {folder for folder in (self._current, self._waiting) if folder is not None}

    def offer(self, folder: Path) -> None:
        """Copy this checkpoint, now or when the copy in progress has ended; replaces one that waits."""
        self._waiting = folder
        self._retry_at = 0.0
        if self._current is None:
            self._start()

    def poll(self) -> UploadOutcome | None:
        """The copy that has ended on all ranks, if any; does not wait. Communicates while there is one."""
        if self._current is not None and self._writer is not None:
            return self._collect() if on_all_ranks_alike(here=self._writer.is_done) else None
        if self._waiting is not None and not on_all_ranks_alike(here=time.monotonic() < self._retry_at):
            self._start()
        return None

    def finish(self, folder: Path | None) -> UploadOutcome | None:
        """Wait until the last checkpoint is copied; returns the outcome, None where nothing was to do."""
        outcome = self._collect() if self._current is not None else None
        if folder is None or self.uploaded == folder.name:
            return outcome
        self._waiting = folder
        self._start()
        return self._collect()

    def close(self) -> None:
        """Destroy the process group of the thread; after `finish`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _start(self) -> None:
        folder, self._waiting = self._waiting, None
        assert folder is not None
        self._current = folder
        if self._writer is None:
            self._writer = BackgroundWriter(timeout_seconds=self._timeout_seconds)
        self._writer.start(lambda group: self._upload(folder, group))

    def _upload(self, folder: Path, group: dist.ProcessGroup) -> Path:
        upload_checkpoint(folder, self.remote, keep_copies=self.spec.keep_copies, group=group)
        if self.spec.delete_local and dist.get_rank() == 0:
            delete_checkpoint(folder)
        return folder

    def _collect(self) -> UploadOutcome:
        assert self._current is not None and self._writer is not None
        folder, self._current, error = self._current, None, None
        try:
            self._writer.result()
            self.uploaded, self._num_failures = folder.name, 0
        except CheckpointError as failure:
            error = failure
            self._num_failures += 1
            pause = _FIRST_PAUSE_SECONDS * 2.0 ** (self._num_failures - 1)
            self._retry_at = time.monotonic() + min(pause, _LONGEST_PAUSE_SECONDS)
            self._waiting = self._waiting or folder
        return UploadOutcome(folder.name, error, self._writer.write_seconds)
