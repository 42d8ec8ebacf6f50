"""A pool of local ranks that run one job after the other: gloo on CPU cores, or NCCL on one card.

Starting torch in eight processes takes most of a minute on two cores, so it is done once: a fork
server imports torch, the ranks are forked from it and stay. Each job forms a fresh process group of
the size it asks for (tens of milliseconds) and leaves none behind.
"""

import contextlib
import datetime
import faulthandler
import io
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from meshwright.mesh import World

# A collective that waits this long has lost a partner: no job computes for a minute.
JOB_TIMEOUT_SECONDS = 120.0
# What is left of a job after its collectives have given up.
GRACE_SECONDS = 30.0
# Before ranks that hang are killed they say where they stand.
LAST_WORDS_SECONDS = 4.0
# gloo keeps the threads of a destroyed group while anything in torch remembers it (a mesh leaves about 20
# groups), and torch's caches may name a group of an earlier world; fresh forks are cheap beside both.
JOBS_PER_FORK = 5
_STORE_VARIABLE = "MESHWRIGHT_RANK_STORE"
_PRELOAD = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "meshwright.train.loop",
    "meshwright.rehearse.steps",
]


class Limits(NamedTuple):
    """What a job may take."""

    job_seconds: float
    """Each of its collectives."""
    silent_seconds: float
    """Until ranks that have not answered are killed."""


class RankFailure(Exception):
    """One or more ranks raised; the text holds each rank's traceback."""


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")


def _take_device(rank: int, device: str) -> str:
    """Make this process a rank of one kind; returns the backend of its process groups."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # DTensor warns about the order of gathers of a parameter that is cut twice: right, and of no use here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if device == "cpu":
        return "gloo"
    # NCCL refuses two ranks on one card of one host, so each rank says that it is a host of its own.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)
    return "cpu:gloo,cuda:nccl"


def rank_device() -> torch.device:
    """The device of the rank that this process is."""
    return torch.device("cuda", 0) if torch.cuda.is_initialized() else torch.device("cpu")


def this_world() -> World:
    """The world of the job that the pool runs at the phase."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(os.environ[_STORE_VARIABLE], size)
    return World(rank=rank, local_rank=rank, num_ranks=size, device=rank_device(), store=store)


def _serve(rank: int, connection: Connection, device: str, limits: Limits, trace_path: Path) -> None:
    """Run jobs until the pipe closes; when asked, or when time runs out, say where this rank stands."""
    try:
        trace = trace_path.open("w")
    except FileNotFoundError:
        return  # the pool was closed, by Ctrl-C, while this rank was forked
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    backend = _take_device(rank, device)
    while True:
        try:
            function, world_size, store_path, args = connection.recv()
        except EOFError:
            return
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            os.environ[_STORE_VARIABLE] = store_path
            store = dist.FileStore(store_path, world_size)
            timeout = datetime.timedelta(seconds=limits.job_seconds)
            # By itself as well: a thread that a driver holds in the kernel takes no signal.
            faulthandler.dump_traceback_later(limits.silent_seconds - LAST_WORDS_SECONDS, file=trace)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            torch.manual_seed(0)
            result = _pack(function(*args))
            dist.barrier()  # a rank that left early would close connections that another still makes
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()


def _start_server() -> None:
    """Start the process that ranks are forked from, deaf to Ctrl-C: a terminal sends that to all of them.

    A mask of signals is inherited. This process hears the signal as soon as the server is started, and
    ends the ranks itself.
    """
    resource_tracker.ensure_running()  # starting it lifts the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads_of(process_id: int) -> str:
    """What the system says of a process's threads: name, and R for running, S for waiting, D for held."""
    found = Counter[str]()
    for status in Path(f"/proc/{process_id}/task").glob("*/status"):
        with contextlib.suppress(OSError, IndexError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            found[f"{fields.get('Name')} {fields.get('State', '?').split()[0]}"] += 1
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))


class RankPool:
    """Forked ranks that run `function(*args)` together in a process group of any size up to `max_ranks`.

    Ranks that give no answer in time are killed, and the failure tells where they stood.
    """

    def __init__(
        self,
        max_ranks: int = 8,
        *,
        device: str = "cpu",
        job_seconds: float = JOB_TIMEOUT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.max_ranks, self.device = max_ranks, device
        self._limits = Limits(job_seconds, job_seconds + grace_seconds)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[tuple[Any, Any]] = []  # processes and our ends of their pipes
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._num_jobs = 0

    def _grow(self, num_ranks: int) -> None:
        _start_server()
        while len(self._workers) < num_ranks:
            ours, theirs = self._context.Pipe()
            rank = len(self._workers)
            process = self._context.Process(
                target=_serve,
                args=(rank, theirs, self.device, self._limits, self._trace_of(rank)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that stand at the phase."""
        return [process.pid for process, _ in self._workers]

    def run(self, function: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
        """What each rank returned, by rank; raises RankFailure with every traceback."""
        assert 1 <= world_size <= self.max_ranks
        if self._num_jobs == JOBS_PER_FORK or not all(process.is_alive() for process, _ in self._workers):
            self.restart()  # a rank may also be dead because somebody killed it
        self._num_jobs += 1
        self._grow(world_size)
        store_path = os.path.join(self._folder.name, uuid.uuid4().hex)
        connections = [connection for _, connection in self._workers[:world_size]]
        for connection in connections:
            connection.send((function, world_size, store_path, args))
        return self._collect(connections)

    def _trace_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.trace"

    def _standing(self, ranks: list[int]) -> str:
        """Where these ranks hang: what each of their threads runs."""
        self._signal(ranks, signal.SIGUSR1)
        time.sleep(1.0)  # they write by themselves
        found = "".join(
            f"\nrank {rank} stands at:\n{self._trace_of(rank).read_text()}"
            f"threads: {_threads_of(self.process_ids[rank])}\n"
            for rank in ranks
        )
        if self.device != "cpu":  # their last words, if torch was asked to print stacks on a fatal signal
            self._signal(ranks, signal.SIGABRT)
            time.sleep(LAST_WORDS_SECONDS)
        return found

    def _signal(self, ranks: list[int], number: signal.Signals) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_ids[rank], number)

    def _collect(self, connections: list[Any]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(connections, range(len(connections)), strict=True))
        while waiting:
            # After a first failure the others hang in a collective: give them a phase to report too.
            ready = wait(list(waiting), timeout=2.0 if failures else self._limits.silent_seconds)
            if not ready:
                break
            for connection in [one for one in connections if one in ready]:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, "the process died"
                (results if succeeded else failures)[rank] = value
        if failures or waiting:
            silent = f"\nno answer from ranks {sorted(waiting.values())}" if waiting else ""
            if not failures:
                silent += self._standing(sorted(waiting.values()))
            self.restart()
            raise RankFailure(
                "".join(f"\nrank {r}:\n{text}" for r, text in sorted(failures.items())) + silent
            )
        return [_unpack(results[rank]) for rank in range(len(connections))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the pool for good."""
        self.restart()
        self._folder.cleanup()

    def restart(self) -> None:
        """Kill the ranks; the next job forks new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()
        self._num_jobs = 0
