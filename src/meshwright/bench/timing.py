"""Time of a call: warm-up, many repeats, median and spread; by device events on a GPU.

Callers use random numbers: matmuls of zeros draw less power and read up to a seventh too fast.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_WARMUP_CALLS = 3
_FEWEST_CALLS = 5
_MOST_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    num_calls: int

    @property
    def spread(self) -> float:
        """90th minus 10th percentile, relative to the median."""
        return (self.p90 - self.p10) / self.median


def timing_of(seconds: Sequence[float]) -> Timing:
    """Median and percentiles of a list of times."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered)
    )


def measure(call: Callable[[], object], device: torch.device, *, seconds: float = 0.3) -> Timing:
    """Time a call repeatedly for about this many seconds, after a warm-up. Synchronizes with the device."""
    for _ in range(_WARMUP_CALLS):
        call()
    synchronize(device)
    started_at = time.perf_counter()
    call()
    synchronize(device)
    once = max(time.perf_counter() - started_at, 1e-7)
    num_calls = max(_FEWEST_CALLS, min(_MOST_CALLS, int(seconds / once)))
    timed = _by_events if device.type == "cuda" else _by_clock
    return timing_of(timed(call, num_calls))


def sustained_seconds(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Mean seconds of one call in the last third of this many seconds of uninterrupted calls."""
    once = measure(call, device, seconds=0.1).median
    num_calls = max(3, int(seconds / once))
    for _ in range(num_calls - num_calls // 3):
        call()
    synchronize(device)
    started_at = time.perf_counter()
    for _ in range(num_calls // 3):
        call()
    synchronize(device)
    return (time.perf_counter() - started_at) / (num_calls // 3)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launched work; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _by_events(call: Callable[[], object], num_calls: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_calls)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    pairs = zip(events[::2], events[1::2], strict=True)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _by_clock(call: Callable[[], object], num_calls: int) -> list[float]:
    seconds = []
    for _ in range(num_calls):
        started_at = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_at)
    return seconds
