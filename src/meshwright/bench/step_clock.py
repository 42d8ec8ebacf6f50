"""Times the steps of a loop: the loop calls `after_step` at the end of each step until it returns False.

A framework that owns its loop calls it from a callback. The stages are: the first step (its loss is recorded,
and compilers run), warm-up, one synchronized step from which the number of timed steps follows, the timed
window, and on a GPU two steps under the profiler.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from meshwright.bench.kernel_time import KernelBudget, budget_of, kernel_recorder, kernels_of
from meshwright.bench.machine_facts import sampled_clock
from meshwright.bench.timing import synchronize, timing_of
from meshwright.parallel.torch_graph_count import num_compiled_graphs

FEWEST_STEPS, MOST_STEPS = 6, 300
PROFILED_STEPS = 2
# The loss is read this often, as a run does for its log. Host sync: the only one in the window.
LOSS_EVERY_STEPS = 10


class TimedWindow:
    """A fixed number of steps: their times, and the device's clock and power meanwhile."""

    def __init__(self, device: torch.device, *, num_steps: int) -> None:
        self._device, self._num_steps = device, num_steps
        self._graphs_before = num_compiled_graphs()
        self._sampling = sampled_clock(device)
        self._clock = self._sampling.__enter__()
        self._losses: list[float] = []
        self._started_at = time.perf_counter()
        self._marks: list[Any] = []
        self._mark()

    def after_step(self, loss: Tensor) -> bool:
        """Note that a step has been launched; False when the window is full."""
        self._mark()
        timed = len(self._marks) - 1
        if timed % LOSS_EVERY_STEPS == 0 or timed == self._num_steps:
            self._losses.append(float(loss.detach()))
        if timed < self._num_steps:
            return True
        synchronize(self._device)
        self._seconds = time.perf_counter() - self._started_at
        self._sampling.__exit__(None, None, None)
        return False

    def result(self) -> dict[str, Any]:
        """The figures of a full window."""
        steps = timing_of(self._step_seconds())
        found = {
            "last_loss": self._losses[-1],
            "step_seconds": steps.median,
            "p10_seconds": steps.p10,
            "p90_seconds": steps.p90,
            "mean_seconds": self._seconds / self._num_steps,
            "num_steps": self._num_steps,
            "graphs_compiled_in_window": num_compiled_graphs() - self._graphs_before,
            **self._clock,
        }
        if self._device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found

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


def steps_in(seconds: float, step_seconds: float, *, fewest: int = FEWEST_STEPS) -> int:
    """Number of steps of a window of this many seconds."""
    return max(fewest, min(MOST_STEPS, round(seconds / max(step_seconds, 1e-6))))


class StepClock:
    """One measurement of steps; `seconds` is the length of its timed window."""

    def __init__(
        self,
        device: torch.device,
        *,
        seconds: float,
        warmup_steps: int,
        fewest_steps: int = FEWEST_STEPS,
        is_profiled: bool = True,
    ) -> None:
        self._device, self._seconds, self._warmup_steps = device, seconds, max(1, warmup_steps)
        self._fewest_steps, self._is_profiled = fewest_steps, is_profiled and device.type == "cuda"
        self._num_steps = 0
        self._started_at = time.perf_counter()
        self._first_loss = self._first_seconds = self._warm_seconds = 0.0
        self._window: TimedWindow | None = None
        self._result: dict[str, Any] | None = None
        self._profile: profile | None = None
        self.budget: KernelBudget | None = None

    def after_step(self, loss: Tensor) -> bool:
        """Note that a step has been launched; False when nothing more is to be measured."""
        self._num_steps += 1
        if self._window is None:
            return self._warm(loss)
        if self._result is None:
            return self._window.after_step(loss) or self._close_window(self._window)
        return self._profiled()

    def _warm(self, loss: Tensor) -> bool:
        synchronize(self._device)
        if self._num_steps == 1:
            self._first_seconds = time.perf_counter() - self._started_at
            self._first_loss = float(loss.detach())
        else:
            self._warm_seconds = time.perf_counter() - self._step_started_at
        if self._num_steps == 2 and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the first step's peak may be the compiler's
        self._step_started_at = time.perf_counter()
        if self._num_steps == 2 + self._warmup_steps:
            num_steps = steps_in(self._seconds, self._warm_seconds, fewest=self._fewest_steps)
            self._window = TimedWindow(self._device, num_steps=num_steps)
        return True

    def _close_window(self, window: TimedWindow) -> bool:
        self._result = window.result()
        if not self._is_profiled:
            return False
        self._profile = kernel_recorder()
        self._profile.__enter__()
        self._profiled_until = self._num_steps + PROFILED_STEPS
        return True

    def _profiled(self) -> bool:
        if self._num_steps < self._profiled_until:
            return True
        assert self._profile is not None
        synchronize(self._device)
        self._profile.__exit__(None, None, None)
        self.budget = budget_of(kernels_of(self._profile), num_steps=PROFILED_STEPS)
        return False

    def result(self) -> dict[str, Any]:
        """All figures that were measured."""
        assert self._result is not None
        return {
            "first_loss": self._first_loss,
            "compile_seconds": max(0.0, self._first_seconds - self._result["step_seconds"]),
            **self._result,
            **kernel_rows(self.budget),
        }


def kernel_rows(budget: KernelBudget | None) -> dict[str, Any]:
    """The figures of a kernel budget; empty ones without it."""
    return {
        "attention_kernels": budget.attention_kernels if budget else [],
        "kernel_seconds": budget.seconds_by_class if budget else {},
        "largest_kernels": budget.largest if budget else [],
    }
