"""When and how checkpoints of a run are written: in the background, with retries, one at a time.

A step waits only for the copy to host memory. Where the storage is slower than the interval of saves, the
next save waits for the one before, so that there is never more than one copy in memory. A failed save never
ends training: it is tried again after a pause that doubles with each failure.
"""

import copy
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.agree import on_all_ranks_alike
from meshwright.checkpoint.assign import BoxAssignment
from meshwright.checkpoint.local_tier import LocalTier
from meshwright.checkpoint.retain import delete_old
from meshwright.checkpoint.save import write_checkpoint
from meshwright.checkpoint.snapshot import HostSnapshot
from meshwright.checkpoint.upload import Uploader, UploadOutcome
from meshwright.checkpoint.writer import BackgroundWriter
from meshwright.errors import CheckpointError
from meshwright.spec import CheckpointSpec

_FIRST_PAUSE_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 600.0


@dataclass(frozen=True)
class SaveOutcome:
    """How one save ended."""

    step: int
    folder: Path | None
    error: CheckpointError | None
    """Why it failed; None where it is published."""
    stall_seconds: float
    """Time that training has waited: for the save before it, and for the copy to host memory."""
    waited_seconds: float
    """The part of it that was a wait for the save before: the storage is slower than the interval."""
    write_seconds: float
    """Time from the copy to the publication."""
    is_background: bool
    """False where training waited for the disk."""
    is_local: bool = False
    """Whether it is a checkpoint of `checkpoint.local` alone."""


@dataclass(frozen=True)
class _Started:
    step: int
    stall_seconds: float
    waited_seconds: float
    is_local: bool


class Saver:
    """Saves the checkpoints of one run; every method is called by all ranks at the same step."""

    def __init__(
        self, root: Path, spec: CheckpointSpec, device: torch.device, *, timeout_seconds: float
    ) -> None:
        self._root, self._spec, self._timeout_seconds = root, spec, timeout_seconds
        self._assignment, self._snapshot = BoxAssignment(), HostSnapshot(device)
        self._writer: BackgroundWriter | None = None
        self.uploader = Uploader(spec.upload, timeout_seconds=timeout_seconds) if spec.upload else None
        self.local = LocalTier(spec.local, root) if spec.local else None
        self._local_error: CheckpointError | None = None
        self._started: _Started | None = None
        self._num_failures, self._retry_at, self._is_retry_due = 0, 0.0, False
        self.saved_step: int | None = None
        """The last step that was published or restored."""
        self._saved_folder: Path | None = None
        self.damaged: list[Path] = []
        """Checkpoints that a restore skipped; they are deleted once a newer one is complete."""

    def is_due(self, step: int) -> bool:
        """Whether a save is due after this step: by its interval, or because the last one failed."""
        return self._is_for_disk(step) or self._is_for_nodes(step)

    def start(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[SaveOutcome]:
        """Copy to host memory and write in the background; returns the outcomes of saves that have ended.

        Where the run or the host's memory does not allow a copy, this waits for the disk.
        """
        to_disk, to_nodes = self._is_for_disk(step), self._is_for_nodes(step)
        started_at = time.perf_counter()
        ended = self.wait()
        waited_seconds = time.perf_counter() - started_at
        mine = self._assignment.local_tensors(tensors)
        if not self._has_room(mine):
            now = self._write_now(step, mine, facts, waited_seconds, to_disk=to_disk, to_nodes=to_nodes)
            return [*ended, *now]
        copies, values = self._snapshot.copy(mine), copy.deepcopy(dict(facts))
        if self._writer is None:
            self._writer = BackgroundWriter(timeout_seconds=self._timeout_seconds)
        self._writer.start(
            lambda group: self._write(step, copies, values, group, to_disk=to_disk, to_nodes=to_nodes)
        )
        stall_seconds = time.perf_counter() - started_at
        self._started = _Started(step, stall_seconds, waited_seconds, is_local=not to_disk)
        return ended

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[SaveOutcome]:
        """Write without a copy and wait for the disk; returns the outcomes, that of this save last."""
        started_at = time.perf_counter()
        ended = self.wait()
        waited_seconds = time.perf_counter() - started_at
        mine = self._assignment.local_tensors(tensors)
        now = self._write_now(step, mine, facts, waited_seconds, to_disk=True, to_nodes=False)
        return [*ended, *now]

    def poll(self) -> list[SaveOutcome]:
        """The save that has ended on all ranks, if any; does not wait. Communicates while one is written."""
        if self._started is not None and self._writer is not None:
            return self.wait() if on_all_ranks_alike(here=self._writer.is_done) else []
        if self._num_failures and not self._is_retry_due:
            self._is_retry_due = not on_all_ranks_alike(here=time.monotonic() < self._retry_at)
        return []

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save that is being written; returns its outcome, or nothing where there is none."""
        if self._started is None or self._writer is None:
            return []
        started, self._started = self._started, None
        folder, error = None, None
        try:
            folder = self._writer.result()
        except CheckpointError as failure:
            error = failure
        outcome = SaveOutcome(
            started.step,
            folder,
            error,
            stall_seconds=started.stall_seconds,
            waited_seconds=started.waited_seconds,
            write_seconds=self._writer.write_seconds,
            is_background=True,
            is_local=started.is_local,
        )
        return self._counted(outcome)

    def poll_upload(self) -> UploadOutcome | None:
        """The copy to the second place that has ended on all ranks, if any; does not wait."""
        return self.uploader.poll() if self.uploader else None

    def finish_upload(self) -> UploadOutcome | None:
        """Wait until the last checkpoint is in the second place; None where nothing was left to do."""
        if self.uploader is None:
            return None
        return self.uploader.finish(self._saved_folder)

    def close(self) -> None:
        """Destroy the process groups of the threads, and delete local checkpoints: the run has ended.

        Comes after `wait` and `finish_upload`.
        """
        if self.local is not None:
            self.local.remove()
        if self.uploader is not None:
            self.uploader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _is_uploaded(self, step: int) -> bool:
        upload = self._spec.upload
        return upload is not None and (upload.interval_steps is None or step % upload.interval_steps == 0)

    def _is_for_disk(self, step: int) -> bool:
        every = self._spec.every_steps
        return self._is_retry_due or (every is not None and step % every == 0)

    def _is_for_nodes(self, step: int) -> bool:
        return self._spec.local is not None and step % self._spec.local.save_every_steps == 0

    def _has_room(self, mine: Mapping[str, Tensor]) -> bool:
        return self._spec.asynchronous and on_all_ranks_alike(here=self._snapshot.reserve(mine))

    def _write_now(
        self,
        step: int,
        mine: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        waited_seconds: float,
        *,
        to_disk: bool,
        to_nodes: bool,
    ) -> list[SaveOutcome]:
        started_at = time.perf_counter()
        folder, error = None, None
        try:
            folder = self._write(step, mine, facts, None, to_disk=to_disk, to_nodes=to_nodes)
        except CheckpointError as failure:
            error = failure
        seconds = time.perf_counter() - started_at
        outcome = SaveOutcome(
            step,
            folder,
            error,
            stall_seconds=waited_seconds + seconds,
            waited_seconds=waited_seconds,
            write_seconds=seconds,
            is_background=False,
            is_local=not to_disk,
        )
        return self._counted(outcome)

    def _write(
        self,
        step: int,
        mine: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        *,
        to_disk: bool,
        to_nodes: bool,
    ) -> Path:
        """Write to the nodes, then to the run directory; a failure of the first does not stop the second."""
        index = self._assignment.index
        if self.local is not None and to_nodes:
            try:
                folder = self.local.write(step, mine, index, facts, group)
                if not to_disk:
                    return folder
            except CheckpointError as error:
                if not to_disk:
                    raise
                self._local_error = error
        folder = write_checkpoint(self._root, step=step, tensors=mine, index=index, facts=facts, group=group)
        if dist.get_rank() == 0:
            with suppress(OSError):  # the checkpoint is complete; what is not deleted now is deleted later
                needed = self.uploader.needed if self.uploader else set()
                delete_old(self._root, self._spec, damaged=self.damaged, needed=needed)
        return folder

    def _counted(self, outcome: SaveOutcome) -> list[SaveOutcome]:
        """The outcome, after that of the nodes where only this one failed."""
        error, self._local_error = self._local_error, None
        self._count(outcome)
        failed = [replace(outcome, folder=None, error=error, is_local=True)] if error is not None else []
        return [*failed, outcome]

    def _count(self, outcome: SaveOutcome) -> None:
        """Plan the next attempt after a failure; all ranks have the same outcome."""
        if outcome.is_local:  # the next interval tries again
            return
        self._is_retry_due = False
        if outcome.error is None:
            self._num_failures, self.saved_step, self.damaged = 0, outcome.step, []
            self._saved_folder = outcome.folder
            if self.uploader is not None and outcome.folder is not None and self._is_uploaded(outcome.step):
                self.uploader.offer(outcome.folder)
            return
        self._num_failures += 1
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** (self._num_failures - 1)
        self._retry_at = time.monotonic() + min(pause, _LONGEST_PAUSE_SECONDS)
