"""How long this rank waits for the gradients of other ranks: a slow rank is the one that waits least."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WaitClock:
    """Adds up the time between the end of this rank's backward and the arrival of reduced gradients.

    On CUDA it is time of the device's stream, measured with events, and no host sync: two events per use.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Entered around a wait for other ranks."""
        if self._is_cuda and torch.cuda.is_initialized():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))
            return
        started_at = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started_at

    def read_seconds(self) -> float:
        """All time that was waited so far; for callers who have waited for the device. Host sync."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds
