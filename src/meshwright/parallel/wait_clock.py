"""How long this rank waits for other ranks: a slow rank is the one that waits least."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event
"""A point in time: of the host, or of the device's stream."""


class WaitClock:
    """Adds up the time in which this rank waits for others: from the end of its backward to the arrival of
    reduced gradients, and with ZeRO-3 for the collectives of FSDP2.

    On CUDA it is time of the device's stream, measured with events, and no host sync: two events per use.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Entered around a wait for other ranks."""
        begun = self.mark()
        yield
        self.add_since(begun)

    def mark(self) -> Mark:
        """The begin of a wait."""
        if not (self._is_cuda and torch.cuda.is_initialized()):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_since(self, begun: Mark) -> None:
        """Add the time since a mark: the wait is over."""
        after = self.mark()
        if isinstance(begun, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
            self._events.append((begun, after))
        elif isinstance(begun, float) and isinstance(after, float):
            self._seconds += after - begun

    def read_seconds(self) -> float:
        """All time that was waited so far; for callers who have waited for the device. Host sync."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds
