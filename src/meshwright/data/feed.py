"""Reads batches ahead, in threads or worker processes; every batch arrives in its order."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

from meshwright.data.fetch import Fetched, Fetcher
from meshwright.data.record_plan import Unit
from meshwright.errors import RunError

_MEASURED_UNITS = 16
# A unit that takes longer to read and decode keeps a worker busy; a shorter one costs more to hand over.
_MIN_WORKER_SECONDS = 0.5e-3
_MAX_WORKERS = 8


@dataclass(frozen=True)
class Feeding:
    """How batches are read ahead; changes no batch."""

    num_workers: int = 0
    workers: Literal["threads", "processes"] = "processes"
    prefetch: int = 2
    """Batches that each worker reads ahead."""
    pin_memory: bool = False
    """Copy the tensors of each batch to pinned memory, from which copies to a device are asynchronous."""
    timeout_seconds: float = 120.0
    """A worker process that gives no batch for so long is an error."""


class Feed(Protocol):
    """Batches in their order."""

    def next(self) -> Fetched:
        """The next batch."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class FeedSharing(Protocol):
    """Ranks that compute on the same samples, of which one may read for all."""

    def feed(self, open_feed: Callable[[], Feed], /) -> Feed:
        """The feed of this rank; `open_feed` is called on ranks that read."""
        ...


def open_feed(fetcher: Fetcher, units: Iterator[list[Unit]], feeding: Feeding) -> Feed:
    """Batches of these units, read as `feeding` says."""
    if feeding.num_workers == 0:
        return _Inline(fetcher, units)
    return (_Threads if feeding.workers == "threads" else _Processes)(fetcher, units, feeding)


class _Inline:
    """Reads each batch when it is asked for."""

    def __init__(self, fetcher: Fetcher, units: Iterator[list[Unit]]) -> None:
        self._fetcher, self._units = fetcher, units

    def next(self) -> Fetched:
        return self._fetcher(next(self._units))

    def close(self) -> None:
        """Does nothing: nothing is read ahead."""


class _Threads:
    """Reads ahead in threads: for sources and decoders that release Python's lock."""

    def __init__(self, fetcher: Fetcher, units: Iterator[list[Unit]], feeding: Feeding) -> None:
        self._fetcher, self._units = fetcher, units
        self._pool = ThreadPoolExecutor(feeding.num_workers, "loader")
        self._depth = feeding.num_workers * feeding.prefetch
        self._in_flight: deque[Future[Fetched]] = deque()

    def next(self) -> Fetched:
        for units in islice(self._units, self._depth + 1 - len(self._in_flight)):
            self._in_flight.append(self._pool.submit(self._fetcher, units))
        return self._in_flight.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Processes:
    """Reads ahead in worker processes; one that is killed or stuck is an error, never a hang or a shift."""

    def __init__(self, fetcher: Fetcher, units: Iterator[list[Unit]], feeding: Feeding) -> None:
        self._units, self._timeout = units, feeding.timeout_seconds
        self._pool = ProcessPoolExecutor(feeding.num_workers, initializer=_start_worker, initargs=(fetcher,))
        self._depth = feeding.num_workers * feeding.prefetch
        self._in_flight: deque[Future[Fetched]] = deque()

    def next(self) -> Fetched:
        for units in islice(self._units, self._depth + 1 - len(self._in_flight)):
            self._in_flight.append(self._pool.submit(_fetch_in_worker, units))
        try:
            return self._in_flight.popleft().result(timeout=self._timeout)
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            is_killed = isinstance(error, BrokenProcessPool)
            fact = "was killed" if is_killed else f"gave no batch for {self._timeout:g} seconds"
            raise RunError(
                f"a worker process of the loader {fact}",
                where="loader",
                hint="a loader that is built again and restored to its last state goes on at the same batch",
            ) from None

    def close(self) -> None:
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()


# The fetcher of a worker process: it is handed over once, not with every batch.
_IN_WORKER: list[Fetcher] = []


def _start_worker(fetcher: Fetcher) -> None:
    _IN_WORKER[:] = [fetcher]


def _fetch_in_worker(units: list[Unit]) -> Fetched:
    return _IN_WORKER[0](units)


def measured_feeding(fetcher: Fetcher, *, pin_memory: bool) -> tuple[Feeding, str]:
    """Workers chosen from reading a few units here and in two threads, and the reason as a text."""
    units = [[one] for one in fetcher.plan.units(0, _MEASURED_UNITS)]
    fetcher(units[0])  # opens files
    alone = _seconds(lambda: [fetcher(one) for one in units]) / len(units)
    cores = len(os.sched_getaffinity(0))
    if alone < _MIN_WORKER_SECONDS or cores == 1:
        reason = f"{alone * 1e3:.2f} ms per sample on {cores} cores: one thread reads ahead"
        return Feeding(1, "threads", pin_memory=False), reason
    with ThreadPoolExecutor(2) as pool:
        together = _seconds(lambda: list(pool.map(fetcher, units))) / len(units)
    kind: Literal["threads", "processes"] = "threads" if alone / together > 1.5 else "processes"
    count = min(cores - 1, _MAX_WORKERS)
    reason = (
        f"{alone * 1e3:.2f} ms per sample, two threads are {alone / together:.1f}x as fast: "
        f"{count} {kind} read 2 batches ahead each"
    )
    return Feeding(count, kind, pin_memory=pin_memory), reason


def _seconds(work: Any) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at
