"""Heartbeats of this rank, for whoever watches it, and the watchdog of ranks that nobody else watches.

The loop only sets a value. Threads write it to the heartbeat file and compare it with the timeouts, so no
step waits for a disk, and nothing waits for the device.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from meshwright.errors import EXIT_RANK_LOST, EXIT_RUN_FAILED
from meshwright.launch.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path, read_heartbeats
from meshwright.launch.launched import is_supervised
from meshwright.resilience.phase_clock import PhaseClock
from meshwright.spec.resilience import Phase, ResilienceSpec

_TICK_SECONDS = 0.5
# A longer time between two ticks: this process was suspended.
_LONGEST_TICK_SECONDS = 5.0
# Heartbeats per second of all ranks together: what a shared file system takes without notice.
_MOST_WRITES_PER_SECOND = 100.0
_MOST_SHOWN = 8


class HeartbeatWriter:
    """The step and phase of this rank. Use as a context; the file is best effort and never ends a run."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        num_ranks: int,
        step: int,
        after_save: Callable[[int], None] | None = None,
    ) -> None:
        """`after_save` is called with the step when the phase `save` ends."""
        self._rank, self._host, self._pid = rank, socket.gethostname(), os.getpid()
        self.clock, self._after_save = PhaseClock(), after_save
        self.now = self._at_this_time("start", step)
        """The last sign of progress."""
        self._path = heartbeat_path(run_dir, rank)
        self._writer = _Ticker("heartbeat", max(1.0, num_ranks / _MOST_WRITES_PER_SECOND), self._write)
        self._file: HeartbeatFile | None = None
        self._written: Heartbeat | None = None

    def enter(self, phase: Phase, step: int) -> None:
        """Set what this rank does next, after `step` steps. Costs no more than a look at the clock, and one
        small write at the end of the first step: until then the timeout is that of a start, which is long."""
        before, is_saved = self.now.phase, self.now.phase == "save" and phase != "save"
        self.clock.enter(phase)
        self.now = self._at_this_time(phase, step)
        if before == "start" and phase != "start":
            self._write()
        if is_saved and self._after_save is not None:
            self._after_save(step)

    def _at_this_time(self, phase: Phase, step: int) -> Heartbeat:
        return Heartbeat(self._rank, self._host, self._pid, step, phase, time.time())

    def write_sign_of_life(self) -> None:
        """Write a heartbeat of this time, though there was no progress."""
        self.now = self._at_this_time(self.now.phase, self.now.step)
        self._write()

    def _write(self) -> None:
        now = self.now
        if self._file is not None and now != self._written:
            with suppress(OSError):  # a full disk or a lost file system ends the run elsewhere, or not at all
                self._file.write(now)
                self._written = now

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._file = HeartbeatFile(self._path)
        self._write()
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file; that of a rank that was killed stays, and shows where it was."""
        self._writer.stop()
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None
        with suppress(OSError):  # the folder goes with the last rank's file
            self._path.unlink()
            self._path.parent.rmdir()


class Watchdog:
    """Ends this process when it makes no progress; for ranks that another launcher started. Use as a context.

    Ranks that wait for one that is stopped or dead make no progress either. They all trip at the same time,
    and each writes a sign of life first: the ranks without one are the reason. The launcher ends the rest.
    """

    def __init__(
        self, heartbeat: HeartbeatWriter, run_dir: Path, resilience: ResilienceSpec, num_ranks: int
    ) -> None:
        self._heartbeat, self._run_dir, self._resilience = heartbeat, run_dir, resilience
        self._num_ranks = num_ranks
        self._seen, self._idle_seconds, self._ticked_at = heartbeat.now, 0.0, time.monotonic()
        self._ticker = _Ticker("watchdog", _TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now, heartbeat = time.monotonic(), self._heartbeat.now
        seconds, self._ticked_at = now - self._ticked_at, now
        if heartbeat != self._seen:
            self._seen, self._idle_seconds = heartbeat, 0.0
        elif seconds < _LONGEST_TICK_SECONDS:
            self._idle_seconds += seconds
        if self._idle_seconds > self._resilience.timeout_seconds(heartbeat.phase):
            self._end()

    def _end(self) -> None:
        tripped_at = time.time()
        self._heartbeat.write_sign_of_life()
        time.sleep(_TICK_SECONDS + 0.5)  # the others trip within a tick
        recently = min(5.0, self._resilience.step_timeout_seconds / 2)
        print(self._report(since=tripped_at - recently), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        os._exit(EXIT_RANK_LOST if is_supervised() else EXIT_RUN_FAILED)

    def _report(self, since: float) -> str:
        now = self._heartbeat.now
        key = self._resilience.timeout_key(now.phase)
        return "\n".join(
            [
                f"error: rank {now.rank} on {now.host} (process {now.pid}) makes no progress for "
                f"{self._idle_seconds:.0f} s: last step {now.step}, phase {now.phase}",
                f"  where: resilience.{key}={self._resilience.timeout_seconds(now.phase):g}",
                f"  hint:  {silent_ranks(self._run_dir, self._num_ranks, since=since)}; started again, the "
                "run resumes from its newest checkpoint",
                f"stack of rank {now.rank}:",
            ]
        )

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.stop()


def silent_ranks(run_dir: Path, num_ranks: int, *, since: float) -> str:
    """The ranks that others wait for, by the heartbeats in the run directory; `since` is in seconds of 1970.

    A rank that lives has written a heartbeat since then. Of those on this host it is known whether they are
    stopped.
    """
    found = {one.rank: one for one in read_heartbeats(run_dir, num_ranks)}
    silent = [one for one in found.values() if one.at < since or _is_stopped(one)]
    missing = [f"rank {rank} (no heartbeat)" for rank in range(num_ranks) if rank not in found]
    shown = [_describe(one) for one in silent] + missing
    if len(shown) in (0, num_ranks):
        least = min((one.step for one in found.values()), default=0)
        late = [str(one.rank) for one in found.values() if one.step == least]
        return f"furthest behind, at step {least}: rank {', '.join(late[:_MOST_SHOWN]) or 'unknown'}"
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return f"no sign of life from {', '.join(shown[:_MOST_SHOWN])}{more}"


def _describe(one: Heartbeat) -> str:
    state = ", which is stopped (SIGSTOP)" if _is_stopped(one) else ""
    return (
        f"rank {one.rank} on {one.host} (process {one.pid}; last step {one.step}, phase {one.phase}){state}"
    )


def _is_stopped(one: Heartbeat) -> bool:
    try:
        is_here = one.host == socket.gethostname()
        return is_here and psutil.Process(one.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


class _Ticker:
    """A thread that calls a function every so often."""

    def __init__(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._seconds, self._action = seconds, action
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not self._is_over.wait(self._seconds):
            self._action()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._is_over.set()
        self._thread.join(timeout=5.0)  # a file system that hangs must not keep the run from ending
