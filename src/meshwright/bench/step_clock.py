"""Times steps that somebody else makes: told after each one, it answers whether it wants more.

A loop calls `after_step` at the end of every step; so does a callback of a framework that owns its loop.
The phases are: the first step (its loss is kept, compilers run), warm-up, one step that is waited for to
learn how many fit in the time, the timed window, and on a GPU one step under the profiler.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.bench.kernel_time import KernelBudget, budget_of, kernels_of
from meshwright.bench.machine_facts import sampled_clock
from meshwright.bench.timing import timing_of, wait_for

FEWEST_STEPS, MOST_STEPS = 6, 300
PROFILED_STEPS = 2
# The loss is read this often, as a run would for its log: the one place where the host waits.
LOSS_EVERY_STEPS = 10


class StepClock:
    """Where a measurement of steps stands. `seconds` is the length of the timed window."""

    def __init__(self, device: torch.device, *, seconds: float, warmup_steps: int) -> None:
        self._device, self._seconds, self._warmup_steps = device, seconds, max(1, warmup_steps)
        self._num_steps = 0
        self._num_timed = 0
        self._started_at = time.perf_counter()
        self._first_seconds = self._warm_seconds = self._window_seconds = 0.0
        self._marks: list[Any] = []
        self._losses: list[float] = []
        self._sampling: Any = None
        self._clock: dict[str, float] = {}
        self._profile: profile | None = None
        self._memory: dict[str, int] = {}
        self._graphs_before = self._graphs_after = 0
        self.budget: KernelBudget | None = None

    def after_step(self, loss: Tensor) -> bool:
        """Tell that a step was launched; False when there is nothing more to measure."""
        self._num_steps += 1
        warm_until = 1 + self._warmup_steps
        if self._num_steps <= warm_until + 1:
            return self._warm(loss, is_last=self._num_steps == warm_until + 1)
        timed = self._num_steps - warm_until - 1
        if timed <= self._num_timed:
            return self._time(loss, timed)
        return self._profiled()

    def _warm(self, loss: Tensor, *, is_last: bool) -> bool:
        wait_for(self._device)
        if self._num_steps == 1:
            self._first_seconds = time.perf_counter() - self._started_at
            self._losses.append(float(loss.detach()))
        else:
            self._warm_seconds = time.perf_counter() - self._step_started_at
        if self._num_steps == 2 and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak of the first step may be a compiler's
        self._step_started_at = time.perf_counter()
        if is_last:
            self._open_window()
        return True

    def _open_window(self) -> None:
        wanted = round(self._seconds / max(self._warm_seconds, 1e-6))
        self._num_timed = max(FEWEST_STEPS, min(MOST_STEPS, wanted))
        self._graphs_before = num_compiled_graphs()
        self._sampling = sampled_clock(self._device)
        self._clock = self._sampling.__enter__()
        self._window_started_at = time.perf_counter()
        self._mark()

    def _time(self, loss: Tensor, timed: int) -> bool:
        self._mark()
        if timed % LOSS_EVERY_STEPS == 0 or timed == self._num_timed:
            self._losses.append(float(loss.detach()))
        if timed < self._num_timed:
            return True
        wait_for(self._device)
        self._window_seconds = time.perf_counter() - self._window_started_at
        self._sampling.__exit__(None, None, None)
        self._graphs_after = num_compiled_graphs()
        if self._device.type != "cuda":
            return False
        self._memory = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()
        self._profiled_until = self._num_steps + PROFILED_STEPS
        return True

    def _profiled(self) -> bool:
        if self._num_steps < self._profiled_until:
            return True
        assert self._profile is not None
        wait_for(self._device)
        self._profile.__exit__(None, None, None)
        self.budget = budget_of(kernels_of(self._profile), num_steps=PROFILED_STEPS)
        return False

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _step_seconds(self) -> list[float]:
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        if self._device.type == "cuda":
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]

    def result(self) -> dict[str, Any]:
        """Everything that was measured, as plain values."""
        steps = timing_of(self._step_seconds())
        return {
            "first_loss": self._losses[0],
            "last_loss": self._losses[-1],
            "step_seconds": steps.median,
            "p10_seconds": steps.p10,
            "p90_seconds": steps.p90,
            "mean_seconds": self._window_seconds / self._num_timed,
            "num_steps": self._num_timed,
            "compile_seconds": max(0.0, self._first_seconds - steps.median),
            "graphs_compiled_in_window": self._graphs_after - self._graphs_before,
            **self._memory,
            **self._clock,
            "attention_kernels": self.budget.attention_kernels if self.budget else [],
            "kernel_seconds": self.budget.seconds_by_class if self.budget else {},
            "largest_kernels": self.budget.largest if self.budget else [],
        }


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far (a private counter: there is no other)."""
    dynamo = getattr(torch, "_dynamo", None)
    return int(dynamo.utils.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
