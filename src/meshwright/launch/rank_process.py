"""One rank as a process: started as a new program, or forked from a process that has imported torch already.

A fork takes milliseconds where a new program imports torch for seconds, so a restart is quick. The process
that forks has imported torch and done nothing else with it: no threads, no device. Imports no torch itself.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from meshwright.errors import EXIT_FAULT

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
Program = Callable[[Sequence[str]], int]
"""Runs one command line of meshwright in this process and returns the exit code."""
_POLL_SECONDS = 0.02


class RankProcess(Protocol):
    """What is done with the process of a rank."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it; None until `poll` finds it ended."""
        ...

    def poll(self) -> int | None:
        """Look whether it has ended; returns `returncode`."""
        ...

    def wait(self) -> int:
        """Wait until it has ended; returns `returncode`."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class ForkedRank:
    """A rank that was forked from this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Look whether it has ended; returns `returncode`."""
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                found, status = self.pid, 0
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait until it has ended; returns `returncode`."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start_rank(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    program: Program | None = None,
) -> RankProcess:
    """Start `meshwright <arguments>`, in a session of its own: a signal to our process group reaches it once,
    from here. With `program` it is forked."""
    if program is not None:
        return _fork(program, arguments, environment, output)
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.Popen(
        command, env=dict(environment), stdout=output, stderr=output, start_new_session=True
    )


def can_fork() -> bool:
    """Whether ranks may be forked from this process: on Linux, without threads, and before it opens a GPU.

    CUDA cannot be used in a process that was forked from one that uses it.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    links: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            links.append(os.readlink(path))
    return not any(link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")) for link in links)


def _fork(
    program: Program, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
) -> ForkedRank:
    sys.stdout.flush()
    sys.stderr.flush()
    # A stop signal between the fork and the reset of the handlers would be passed on by the rank as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _become_rank(program, arguments, environment, output, before)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedRank(pid)


def _become_rank(
    program: Program,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    signals: Iterable[int],
) -> None:
    """The rest of the life of a forked rank; never returns."""
    code = EXIT_FAULT
    try:
        os.setsid()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.environ.clear()
        os.environ.update(environment)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = program(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # nothing of the process that forked may run here
