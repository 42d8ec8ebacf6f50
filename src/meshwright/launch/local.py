"""Ranks on this machine: one process each, all ended together."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshwright.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NO_FIT,
    EXIT_RANK_OUT_OF_MEMORY,
    EXIT_RUN_FAILED,
)
from meshwright.hardware.machine import this_machine

_POLL_SECONDS = 0.1
# After one rank has failed the others wait in a collective; this is how long they get to notice.
_GRACE_SECONDS = 10.0
# Ranks that fail within this time of each other failed for the same reason, and rank 0 has printed it.
_TOGETHER_SECONDS = 1.0
_STARTED_HERE = "MESHWRIGHT_LOCAL_RANKS"


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
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as folder, ExitStack() as files:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            output = files.enter_context((Path(folder) / f"rank-{rank}").open("wb")) if rank else None
            command = [sys.executable, "-m", "meshwright", *arguments]
            environment = _environment(rank, num_ranks, port)
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        with _signals_passed_on(processes):
            failed = _wait(processes)
        if failed is None:
            return 0
        if failed and not _is_refused_by_all(processes, failed):
            text = (Path(folder) / f"rank-{failed}").read_text(errors="replace").strip()
            print(f"rank {failed} failed first:\n{text[-4000:]}", file=sys.stderr)
        return _exit_code(processes[failed].returncode)


def _is_refused_by_all(processes: list[subprocess.Popen[bytes]], failed: int) -> bool:
    """Wrong input is refused by every rank with the same text, and rank 0 has printed it."""
    code = processes[failed].returncode
    return code in (EXIT_INPUT, EXIT_NO_FIT) and processes[0].returncode == code


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    environment[_STARTED_HERE] = str(num_ranks)
    # Each rank its share of the cores: the default would give every rank all of them.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, this_machine().cores // num_ranks)))
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve for a local run
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _signals_passed_on(processes: list[subprocess.Popen[bytes]]) -> Generator[None]:
    """Stop signals go to the ranks, which save and end; this process only waits for them."""

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    # A terminal sends Ctrl-C to the ranks itself: they are in this process group.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended: the rank whose failure is the reason, or None where none failed."""
    failed_at, failed = None, None
    while any(process.poll() is None for process in processes):
        if failed_at is None and _first_failure(processes) is not None:
            failed_at = time.monotonic()
        if failed_at is not None and failed is None and time.monotonic() - failed_at > _TOGETHER_SECONDS:
            failed = _first_failure(processes)
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    return failed if failed is not None else _first_failure(processes)


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Of the ranks that have failed so far, one that ran out of memory, else the lowest; None for none.

    When a rank runs out of memory the others fail as well, because they lose the connection to it.
    """
    codes = {rank: process.poll() for rank, process in enumerate(processes)}
    out_of_memory = [rank for rank, code in codes.items() if code == EXIT_RANK_OUT_OF_MEMORY]
    return next(iter([*out_of_memory, *(rank for rank, code in codes.items() if code)]), None)


def _exit_code(returncode: int) -> int:
    """A rank that a signal ended counts as a failed run, unless it was Ctrl-C."""
    if returncode == -signal.SIGINT:
        return EXIT_INTERRUPTED
    return returncode if returncode >= 0 else EXIT_RUN_FAILED
