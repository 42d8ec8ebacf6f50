"""Ranks on this machine: one process each, all ended together."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from meshwright.errors import (
    EXIT_FAULT,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NO_FIT,
    EXIT_RANK_OUT_OF_MEMORY,
    EXIT_RUN_FAILED,
)
from meshwright.hardware.machine import this_machine

Process = subprocess.Popen[bytes]

_POLL_SECONDS = 0.1
# After one rank has failed the others wait in a collective; this is how long they get to notice.
_GRACE_SECONDS = 10.0
# Ranks that fail within this time of each other failed for the same reason, and rank 0 has printed it.
_TOGETHER_SECONDS = 1.0
# Ranks that were asked twice to stop and do not end are killed after this time.
_STOP_SECONDS = 10.0
_STARTED_HERE = "MESHWRIGHT_LOCAL_RANKS"
STORE_FILE = "MESHWRIGHT_STORE_FILE"
"""The variable that names the file in which local ranks find each other."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def is_rank() -> bool:
    """Whether a launcher (torchrun, or `run_local`) has already started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_local_rank() -> bool:
    """Whether `run_local` started this process as a rank, so that its exit status is read here."""
    return is_rank() and _STARTED_HERE in os.environ


def run_local(arguments: Sequence[str], *, num_ranks: int) -> int:
    """Start `python -m meshwright <arguments>` once per rank and wait; returns the first failing exit code.

    Rank 0 prints to this terminal. Output of the other ranks is kept in files and printed when one of them
    fails first. EXIT_RANK_OUT_OF_MEMORY is returned where any rank ran out of memory.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as folder, ExitStack() as files:
        processes: list[Process] = []
        stopping = _Stopping(processes)
        with stopping.signals_passed_on():
            for rank in range(num_ranks):
                output = files.enter_context((Path(folder) / f"rank-{rank}").open("wb")) if rank else None
                processes.append(_start(arguments, _environment(rank, num_ranks, Path(folder)), output))
            failed = _wait(processes, stopping)
        if failed is None:
            return 0
        if not _is_refused_by_all(processes, failed):
            _print_failure(processes[failed], failed, Path(folder) / f"rank-{failed}", stopping)
        return _exit_code(processes[failed].returncode, stopping)


def _start(arguments: Sequence[str], environment: dict[str, str], output: IO[bytes] | None) -> Process:
    """One rank, in a session of its own: a signal to our process group reaches it once, from here."""
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def _print_failure(process: Process, rank: int, output: Path, stopping: "_Stopping") -> None:
    """Name the rank whose failure ended the run; rank 0 has printed its own error."""
    code = process.returncode
    if code < 0 and stopping.number is not None:
        name = signal.Signals(stopping.number).name
        print(
            f"stopped by {name} before the first step: nothing was trained since the start", file=sys.stderr
        )
    elif code < 0:
        name = signal.Signals(-code).name
        guess = "; was host memory full?" if -code == signal.SIGKILL else ""
        print(f"rank {rank} was killed by signal {-code} ({name}){guess}", file=sys.stderr)
    text = output.read_text(errors="replace").strip() if rank else ""
    if text:
        print(f"rank {rank} failed first:\n{text[-4000:]}", file=sys.stderr)


def _is_refused_by_all(processes: list[Process], failed: int) -> bool:
    """Wrong input is refused by every rank with the same text, and rank 0 has printed it."""
    code = processes[failed].returncode
    return code in (EXIT_INPUT, EXIT_NO_FIT) and processes[0].returncode == code


def _environment(rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    environment[STORE_FILE] = str(folder / "store")
    environment[_STARTED_HERE] = str(num_ranks)
    # Each rank its share of the cores: the default would give every rank all of them.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, this_machine().cores // num_ranks)))
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve for a local run
    return environment


class _Stopping:
    """Stop signals go to the ranks, which save and end; this process only waits for them."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes
        self.number: int | None = None
        """The first stop signal."""
        self._asked_at = 0.0
        self.kill_at = math.inf
        """When ranks that were asked again are killed."""

    def _pass_on(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._asked_at = number, now
        elif now - self._asked_at > _STOP_SECONDS / 2:
            self.kill_at = min(self.kill_at, now + _STOP_SECONDS)
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    @contextmanager
    def signals_passed_on(self) -> Generator[None]:
        """While inside, every stop signal is passed on."""
        before = {number: signal.signal(number, self._pass_on) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _wait(processes: list[Process], stopping: _Stopping) -> int | None:
    """Wait until all have ended: the rank whose failure is the reason, or None where none failed."""
    failed_at, failed = None, None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and _first_failure(processes) is not None:
            failed_at = now
        if failed_at is not None and failed is None and now - failed_at > _TOGETHER_SECONDS:
            failed = _first_failure(processes)
        if (failed_at is not None and now - failed_at > _GRACE_SECONDS) or now > stopping.kill_at:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    return failed if failed is not None else _first_failure(processes)


def _first_failure(processes: list[Process]) -> int | None:
    """Of the ranks that have failed so far the one that explains the others; None for none.

    When a rank runs out of memory, is killed or refuses something, the others fail as well: they lose the
    connection to it.
    """
    codes = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
    return min(codes, key=lambda rank: (_consequence(codes[rank]), rank), default=None)


def _consequence(code: int) -> int:
    """How likely a failure is only the consequence of another rank's."""
    if code == EXIT_RANK_OUT_OF_MEMORY:
        return 0
    return 1 if code < 0 else 3 if code in (EXIT_RUN_FAILED, EXIT_FAULT) else 2


def _exit_code(returncode: int, stopping: _Stopping) -> int:
    """A rank that a signal ended counts as a failed run, unless it was Ctrl-C or this process was stopped."""
    if returncode == -signal.SIGINT or (returncode < 0 and stopping.number is not None):
        return EXIT_INTERRUPTED
    return returncode if returncode >= 0 else EXIT_RUN_FAILED
