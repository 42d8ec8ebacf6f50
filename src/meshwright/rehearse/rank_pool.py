"""A pool of local ranks that run one job after the other: gloo on CPU cores, or NCCL on one GPU.

Starting torch in eight processes takes most of a minute on two cores, so it is done once: a fork server
imports torch, and the ranks are forked from it and stay alive. Each job creates a new process group of the
size it asks for (tens of milliseconds) and destroys it at the end.
"""

import contextlib
import datetime
import faulthandler
import gc
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
from meshwright.rehearse.torch_dtensor_cache import forget_meshes

# A collective that waits this long has lost a peer: no job computes for a minute.
JOB_TIMEOUT_SECONDS = 120.0
# Time for a job to end after its collectives have timed out.
GRACE_SECONDS = 30.0
# Time for ranks that hang to dump their stacks before they are killed.
STACK_DUMP_SECONDS = 4.0
# gloo keeps the threads of a destroyed group while anything in torch refers to it (a mesh leaves about 20
# groups), and torch's caches may refer to a group of an earlier world; forking again is cheap.
JOBS_PER_FORK = 5
_PRELOAD = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "meshwright.train.loop",
    "meshwright.rehearse.steps",
]


class Limits(NamedTuple):
    """Time limits of a job."""

    job_seconds: float
    """Timeout of each collective."""
    silent_seconds: float
    """Time after which ranks that have not answered are killed."""


class RankFailure(Exception):
    """One or more ranks raised; the text holds each rank's traceback."""


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")


def _set_device(rank: int, device: str) -> str:
    """Set this process up as a rank on CPU or CUDA; returns the backend of its process groups."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # DTensor warns about the order of gathers of a parameter that is sharded twice: correct, and no use here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if device == "cpu":
        return "gloo"
    # NCCL refuses two ranks on one GPU of one host, so each rank claims to be a host of its own.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)
    return "cpu:gloo,cuda:nccl"


def rank_device() -> torch.device:
    """The device of this process's rank."""
    return torch.device("cuda", 0) if torch.cuda.is_initialized() else torch.device("cpu")


def this_world() -> World:
    """The world of the job that the pool is running; called inside a rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank=rank, local_rank=rank, num_ranks=size, device=rank_device())


def _serve(rank: int, connection: Connection, device: str, limits: Limits, trace_path: Path) -> None:
    """Run jobs until the pipe closes; on SIGUSR1, or when time runs out, dump the stacks of all threads."""
    gc.freeze()  # what the server imported stays: a collection would only walk it, and copy its pages
    try:
        trace = trace_path.open("w")
    except FileNotFoundError:
        return  # the pool was closed, by Ctrl-C, while this rank was forked
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
    backend = _set_device(rank, device)
    while True:
        try:
            function, world_size, store_path, args = connection.recv()
        except EOFError:
            return
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            store = dist.FileStore(store_path, world_size)
            timeout = datetime.timedelta(seconds=limits.job_seconds)
            # Without a signal as well: a thread that a driver blocks in the kernel receives none.
            faulthandler.dump_traceback_later(limits.silent_seconds - STACK_DUMP_SECONDS, file=trace)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            torch.manual_seed(0)
            result = _pack(function(*args))
            dist.barrier()  # a rank that left early would close connections that another is still opening
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()


def _start_server() -> None:
    """Start the process that ranks are forked from, with SIGINT blocked: a terminal sends it to all of them.

    A signal mask is inherited. This process unblocks SIGINT once the server is started, and ends the ranks
    itself.
    """
    resource_tracker.ensure_running()  # starting it clears the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads_of(process_id: int) -> str:
    """The threads of a process by name and state: R running, S sleeping, D blocked in the kernel."""
    found = Counter[str]()
    for status in Path(f"/proc/{process_id}/task").glob("*/status"):
        with contextlib.suppress(OSError, IndexError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            found[f"{fields.get('Name')} {fields.get('State', '?').split()[0]}"] += 1
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))


class RankPool:
    """Forked ranks that run `function(*args)` together in a process group of any size up to `max_ranks`.

    Ranks that do not answer in time are killed, and the failure contains their stacks.
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
        """Process ids of the ranks that are alive."""
        return [process.pid for process, _ in self._workers]

    def run(self, function: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
        """What each rank returned, by rank; raises RankFailure with every traceback."""
        assert 1 <= world_size <= self.max_ranks
        if self._num_jobs == JOBS_PER_FORK or not all(process.is_alive() for process, _ in self._workers):
            self.restart()  # a rank may have been killed from outside
        self._num_jobs += 1
        self._grow(world_size)
        store_path = os.path.join(self._folder.name, uuid.uuid4().hex)
        connections = [connection for _, connection in self._workers[:world_size]]
        for connection in connections:
            connection.send((function, world_size, store_path, args))
        return self._collect(connections)

    def _trace_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.trace"

    def _stacks(self, ranks: list[int]) -> str:
        """The stacks of ranks that hang, and the states of their threads."""
        self._signal(ranks, signal.SIGUSR1)
        time.sleep(1.0)  # the ranks write their stacks themselves
        found = "".join(
            f"\nrank {rank} hangs at:\n{self._trace_of(rank).read_text()}"
            f"threads: {_threads_of(self.process_ids[rank])}\n"
            for rank in ranks
        )
        if self.device != "cpu":  # C++ stacks, if torch was set to print them on a fatal signal
            self._signal(ranks, signal.SIGABRT)
            time.sleep(STACK_DUMP_SECONDS)
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
            # After a first failure the others hang in a collective: give them two seconds to report too.
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
                silent += self._stacks(sorted(waiting.values()))
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
        """End the ranks and remove the pool's files."""
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
