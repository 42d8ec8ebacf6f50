"""Ranks on this machine: one process each, all ended together."""

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshwright.errors import (
    EXIT_FAULT,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NO_FIT,
    EXIT_RANK_LOST,
    EXIT_RANK_OUT_OF_MEMORY,
    EXIT_RUN_FAILED,
)
from meshwright.hardware.machine import this_machine
from meshwright.launch.attempt import AttemptEnd, Interruption, cause_of
from meshwright.launch.launched import RANK_FOLDER, STARTED_HERE
from meshwright.launch.launched_node import LaunchedNode
from meshwright.launch.meeting import STORE_FILE
from meshwright.launch.rank_process import STOP_SIGNALS, Program, RankProcess, start_rank
from meshwright.launch.watch import RankWatcher, Watched, is_stopped

_POLL_SECONDS = 0.05
# After one rank has failed the others wait in a collective; this is how long they get to notice.
_GRACE_SECONDS = 10.0
# Ranks that fail within this time of each other failed for the same reason, and rank 0 has printed it.
_TOGETHER_SECONDS = 1.0
# Ranks that were asked twice to stop and do not end are killed after this time.
_STOP_SECONDS = 10.0
# The same where all ranks are restarted: after a kill the cause is known, after an error not always.
_RESTART_GRACE_SECONDS, _KILLED_GRACE_SECONDS = 2.0, 0.2
# Ranks that were asked to stop on another node: the reason is known here within this time.
_ASKED_SECONDS = 2.0
THREADS = "OMP_NUM_THREADS"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
Interrupted = Callable[[], Interruption | None]
"""Returns why the ranks are to end; None while they are not."""


def run_local(arguments: Sequence[str], *, num_ranks: int) -> int:
    """Start `python -m meshwright <arguments>` once per rank and wait; returns the first failing exit code.

    Rank 0 prints to this terminal. Output of the other ranks is kept in files and printed when one of them
    fails first.
    """
    return run_attempt(arguments, num_ranks=num_ranks).code


def run_attempt(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    watched: Watched | None = None,
    node: LaunchedNode | None = None,
    program: Program | None = None,
    interrupted: Interrupted | None = None,
    devices: Sequence[int] | None = None,
) -> AttemptEnd:
    """Start the ranks once and wait until all have ended.

    With `watched`, ranks that make no progress are reported and ended. With `node` they join those of other
    nodes. With `program` they are forked from this process. `interrupted` is called often; the ranks end when
    it returns a reason. `devices` are the GPUs of this machine that the ranks use, by default the first ones.
    """
    first = node.node * num_ranks if node else 0
    is_restarted = watched is not None and watched.is_restarted
    with tempfile.TemporaryDirectory(prefix="meshwright-ranks-") as folder, ExitStack() as files:
        processes: list[RankProcess] = []
        stopping = _Stopping(processes)
        with stopping.signals_passed_on():
            for rank in range(num_ranks):
                output = files.enter_context((Path(folder) / f"rank-{rank}").open("wb")) if rank else None
                environment = _environment(rank, num_ranks, Path(folder), node)
                environment |= visible_devices(devices)
                processes.append(start_rank(arguments, environment, output, program))
            watcher = RankWatcher(watched, processes, Path(folder), first_rank=first) if watched else None
            if watcher:
                files.callback(watcher.close)
            waited = _Wait(processes, stopping, watcher, interrupted, is_restarted=is_restarted)
            waited.until_all_have_ended()
        step, failed = watcher.reached_step if watcher else None, waited.failed
        if waited.interruption is not None and waited.is_interrupted:
            found = waited.interruption
            return AttemptEnd(found.cause, found.code, found.text, step)
        if failed is None:
            return AttemptEnd("done", 0, reached_step=step)
        if waited.hang:
            late = watcher.hanging if watcher else None
            return AttemptEnd("hang", EXIT_RUN_FAILED, waited.hang, step, late)
        output = Path(folder) / f"rank-{failed}" if failed else None
        text = _failure(processes[failed], first + failed, stopping)
        if not _is_refused_by_all(processes, failed):
            _print_failure(text, first + failed, output)
        returncode = processes[failed].returncode or 0
        cause = cause_of(returncode, is_stopping=stopping.number is not None)
        return AttemptEnd(cause, _exit_code(returncode, stopping), text, step, waited.only_culprit)


def visible_devices(devices: Sequence[int] | None) -> dict[str, str]:
    """The variable that shows a rank only these GPUs, of those that this process sees."""
    if devices is None:
        return {}
    seen = [name.strip() for name in os.environ.get(VISIBLE_DEVICES, "").split(",") if name.strip()]
    if seen and len(seen) <= max(devices):  # several ranks share a GPU
        return {}
    return {VISIBLE_DEVICES: ",".join(seen[index] if seen else str(index) for index in devices)}


def _failure(process: RankProcess, rank: int, stopping: "_Stopping") -> str:
    """One line about the rank whose failure ended the run."""
    code = process.returncode or 0
    if code < 0 and stopping.number is not None:
        name = signal.Signals(stopping.number).name
        return f"stopped by {name} before the first step: nothing was trained since the start"
    if code < 0:
        guess = "; was host memory full?" if -code == signal.SIGKILL else ""
        return f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){guess}"
    return f"rank {rank} ended with exit code {code}"


def _print_failure(failure: str, rank: int, output: Path | None) -> None:
    """Name the rank whose failure ended the run; the first one here has printed its own error."""
    if "exit code" not in failure:
        print(failure, file=sys.stderr)
    text = output.read_text(errors="replace").strip() if output else ""
    if text:
        print(f"rank {rank} failed first:\n{text[-4000:]}", file=sys.stderr)


def _is_refused_by_all(processes: list[RankProcess], failed: int) -> bool:
    """Wrong input is refused by every rank with the same text, and rank 0 has printed it."""
    code = processes[failed].returncode
    return code in (EXIT_INPUT, EXIT_NO_FIT) and processes[0].returncode == code


def _environment(rank: int, num_ranks: int, folder: Path, node: LaunchedNode | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault(THREADS, default_threads(num_ranks))
    environment[RANK_FOLDER] = str(folder)
    if node is not None:
        if node.interface:
            environment.setdefault("GLOO_SOCKET_IFNAME", node.interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", node.interface)
        return environment | node.rank_variables(rank, num_ranks)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    environment[STORE_FILE] = str(folder / "store")
    environment[STARTED_HERE] = str(num_ranks)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve for a local run
    return environment


def default_threads(num_ranks: int) -> str:
    """Each rank its share of the cores: the default would give every rank all of them."""
    return str(max(1, this_machine().cores // num_ranks))


class _Stopping:
    """Stop signals go to the ranks, which save and end; this process only waits for them."""

    def __init__(self, processes: list[RankProcess]) -> None:
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


class _Wait:
    """The wait until all ranks of an attempt have ended."""

    def __init__(
        self,
        processes: list[RankProcess],
        stopping: _Stopping,
        watcher: RankWatcher | None,
        interrupted: Interrupted | None,
        *,
        is_restarted: bool,
    ) -> None:
        self._processes, self._stopping, self._watcher = processes, stopping, watcher
        self._ask, self._is_restarted = interrupted or (lambda: None), is_restarted
        self._failed_at: float | None = None
        self.failed: int | None = None
        """The rank whose failure is the reason; None where none has failed."""
        self.only_culprit: int | None = None
        """The same rank, unless others failed in the same way."""
        self.hang = ""
        """The text of a hang, which is reported already."""
        self.interruption: Interruption | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the ranks ended because they were asked to, and for no other reason."""
        found = self.interruption
        if found is None or not found.saves:
            return found is not None
        is_asked_by_user = self._stopping.number is not None
        codes = {process.returncode for process in self._processes}
        return not is_asked_by_user and codes <= {EXIT_INTERRUPTED, -signal.SIGTERM}

    def until_all_have_ended(self) -> None:
        """Wait, and end all ranks after a failure, a hang or an interruption."""
        while any(process.poll() is None for process in self._processes):
            self._look_for_failure(time.monotonic())
            if self._stopping.number is not None:
                _continue_stopped(self._processes)
            if self._is_hanging() or self._is_interrupted_at_once():
                _end(self._processes)
                self.failed = 0
                return
            time.sleep(_POLL_SECONDS)
        if self.failed is None:
            self._name_culprit()
        self._ask_why_ranks_have_stopped()

    def _ask_why_ranks_have_stopped(self) -> None:
        """Ranks of another node may have been asked to save and stop a moment before those here."""
        codes = {process.returncode for process in self._processes}
        is_asked = self._stopping.number is not None or self.interruption is not None
        deadline = time.monotonic() + (0.0 if is_asked or codes != {EXIT_INTERRUPTED} else _ASKED_SECONDS)
        while self.interruption is None and time.monotonic() < deadline:
            self.interruption = self._ask()
            time.sleep(_POLL_SECONDS)

    def _look_for_failure(self, now: float) -> None:
        """Note the first failure, and kill the others when their grace is over."""
        if self._failed_at is None and _first_failure(self._processes) is not None:
            self._failed_at = now
        since = math.inf if self._failed_at is None else now - self._failed_at
        if self._failed_at is not None and self.failed is None and since > _TOGETHER_SECONDS:
            self._name_culprit()
        is_asked = self._stopping.number is not None or self.interruption is not None
        grace = _grace(self._processes, is_restarted=self._is_restarted and not is_asked)
        if (self._failed_at is not None and since > grace) or now > self._stopping.kill_at:
            if self.failed is None:  # before others are killed
                self._name_culprit()
            for process in self._processes:
                process.kill()

    def _name_culprit(self) -> None:
        self.failed = _first_failure(self._processes)
        if self.failed is None:
            return
        kind = _consequence(self._processes[self.failed].returncode or 0)
        alike = [one for one in self._processes if one.poll() and _consequence(one.poll() or 0) == kind]
        self.only_culprit = self.failed if len(alike) == 1 else None

    def _is_hanging(self) -> bool:
        if self._watcher is not None and self._failed_at is None:
            self.hang = self._watcher.tick() or ""
        return bool(self.hang)

    def _is_interrupted_at_once(self) -> bool:
        """Ask whether the ranks are to end; those that save first are only told."""
        if self.interruption is None and self._failed_at is None and self._stopping.number is None:
            self.interruption = self._ask()
            if self.interruption is not None and self.interruption.saves:
                for process in self._processes:
                    process.send_signal(signal.SIGTERM)
        return self.interruption is not None and not self.interruption.saves


def _grace(processes: list[RankProcess], *, is_restarted: bool) -> float:
    """Time from the first failure until ranks that still run are killed."""
    if not is_restarted:
        return _GRACE_SECONDS
    is_killed = any((process.poll() or 0) < 0 for process in processes)
    return _KILLED_GRACE_SECONDS if is_killed else _RESTART_GRACE_SECONDS


def _continue_stopped(processes: list[RankProcess]) -> None:
    """Let stopped ranks run on, so that they get the stop signal and the run can save."""
    for process in processes:
        if process.poll() is None and is_stopped(process):
            process.send_signal(signal.SIGCONT)


def _end(processes: list[RankProcess]) -> None:
    """Kill all ranks at once: those that hang cannot save, and a stopped one gets no other signal."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _first_failure(processes: list[RankProcess]) -> int | None:
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
    if code == EXIT_RANK_LOST:
        return 4
    return 1 if code < 0 else 3 if code in (EXIT_RUN_FAILED, EXIT_FAULT) else 2


def _exit_code(returncode: int, stopping: _Stopping) -> int:
    """A rank that a signal ended counts as a failed run, unless it was Ctrl-C or this process was stopped."""
    if returncode == -signal.SIGINT or (returncode < 0 and stopping.number is not None):
        return EXIT_INTERRUPTED
    return returncode if returncode >= 0 else EXIT_RUN_FAILED
