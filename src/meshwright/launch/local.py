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

from meshwright.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_NO_FIT, EXIT_RUN_FAILED
from meshwright.hardware.machine import this_machine

_POLL_SECONDS = 0.1
# After one rank has failed the others wait in a collective; this is how long they get to notice.
_GRACE_SECONDS = 10.0
# Ranks that fail within this time of each other failed of the same cause, and rank 0 has told it.
_TOGETHER_SECONDS = 1.0


def is_rank() -> bool:
    """Whether a launcher (torchrun, or `run_local`) has already started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_local(arguments: Sequence[str], *, num_ranks: int) -> int:
    """Start `python -m meshwright <arguments>` once per rank and wait; returns the first failing exit code.

    Rank 0 speaks on this terminal. The others' words are kept aside and shown when one of them fails first.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as folder, ExitStack() as files:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            aside = files.enter_context((Path(folder) / f"rank-{rank}").open("wb")) if rank else None
            command = [sys.executable, "-m", "meshwright", *arguments]
            environment = _environment(rank, num_ranks, port)
            processes.append(subprocess.Popen(command, env=environment, stdout=aside, stderr=aside))
        with _signals_passed_on(processes):
            failed = _wait(processes)
        if failed is None:
            return 0
        if failed and not _is_refused_by_all(processes, failed):
            words = (Path(folder) / f"rank-{failed}").read_text(errors="replace").strip()
            print(f"rank {failed} failed first:\n{words[-4000:]}", file=sys.stderr)
        return _exit_code(processes[failed].returncode)


def _is_refused_by_all(processes: list[subprocess.Popen[bytes]], failed: int) -> bool:
    """Wrong input is refused by every rank in the same words, and rank 0 has said them."""
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
    """The rank that failed first (rank 0 where several did), or None."""
    failed_at, failed = None, None
    while any(process.poll() is None for process in processes):
        failures = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failures and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and failed is None and time.monotonic() - failed_at > _TOGETHER_SECONDS:
            failed = failures[0]
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    if failed is not None:
        return failed
    return next((rank for rank, process in enumerate(processes) if process.returncode), None)


def _exit_code(returncode: int) -> int:
    """A rank that a signal ended counts as a failed run, unless it was Ctrl-C."""
    if returncode == -signal.SIGINT:
        return EXIT_INTERRUPTED
    return returncode if returncode >= 0 else EXIT_RUN_FAILED
