"""Times the steps of a resident contender: warm-up, then windows when its turn comes, with rests between.

The contender's loop (or its framework's) tells it after each step; between turns the clock does not return,
and the memory that only a running step needs goes back to the card.
"""

import gc
import time
from collections.abc import Generator
from typing import Any

import torch
from bench.interleaved.channel import Channel
from torch import Tensor

from meshwright.bench.kernel_time import budget_of, kernel_recorder, kernels_of
from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.step_clock import TimedWindow, kernel_rows, steps_in
from meshwright.bench.timing import synchronize


class TurnClock:
    """See the module. `times` is how many times the usual number of micro-batches the present step has."""

    def __init__(self, device: torch.device, channel: Channel, *, warmup_steps: int) -> None:
        self.times = 1
        self.compile_seconds = 0.0
        self._device, self._channel, self._warmup_steps = device, channel, max(1, warmup_steps)
        self._started_at = time.perf_counter()
        self._waited_seconds = 0.0
        self._course = self._run()
        next(self._course)

    def take_card(self) -> None:
        """Tell that everything is ready to run, and wait until the card may be used."""
        asked_at = time.perf_counter()
        self._channel.send(state="compiled")
        self._channel.receive()
        self._waited_seconds += time.perf_counter() - asked_at

    def after_step(self, loss: Tensor) -> bool:
        """Tell that a step was launched; False when there is nothing more to measure."""
        try:
            self._course.send(loss)
        except StopIteration:
            return False
        return True

    def _run(self) -> Generator[None, Tensor, None]:
        first_loss = float((yield).detach())
        first_seconds = time.perf_counter() - self._started_at - self._waited_seconds
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak of the first step may be a compiler's
        for _ in range(self._warmup_steps):
            started_at = time.perf_counter()
            yield
            synchronize(self._device)
            # Others may warm up at the same time: corrected when the turn comes.
            step_seconds = self._step_seconds = time.perf_counter() - started_at
        self._channel.send(
            state="ready",
            first_loss=first_loss,
            compile_seconds=max(self.compile_seconds, first_seconds - step_seconds),
            facts=machine_facts(self._device),
            **self._memory(),
        )
        while (order := self._channel.receive())["order"] == "turn":
            yield from self._turn(order)

    def _turn(self, order: dict[str, Any]) -> Generator[None, Tensor, None]:
        for _ in range(order["lead_steps"]):
            started_at = time.perf_counter()
            yield
            synchronize(self._device)
            self._step_seconds = min(self._step_seconds, time.perf_counter() - started_at)
        self.times = order["times"]
        step_seconds = self._step_seconds * self.times
        num_steps = steps_in(order["seconds"], step_seconds, fewest=order["fewest_steps"])
        window = TimedWindow(self._device, num_steps=num_steps)
        while window.after_step((yield)):
            pass
        row = window.result()
        self._step_seconds = row["step_seconds"] / self.times
        if order["is_profiled"] and self._device.type == "cuda":
            row |= yield from self._profiled()
        self.times = 1
        self._channel.send(state="timed", row=row, **self._memory(is_kept=order["is_kept"]))

    def _profiled(self) -> Generator[None, Tensor, dict[str, Any]]:
        with kernel_recorder() as recorded:
            yield
            synchronize(self._device)
        return kernel_rows(budget_of(kernels_of(recorded), num_steps=1))

    def _memory(self, *, is_kept: bool = False) -> dict[str, int]:
        """Bytes at the peak and at rest; unless `is_kept`, what is not in use goes back to the card."""
        if self._device.type != "cuda":
            return {"peak_bytes": 0, "rest_bytes": 0}
        peak = torch.cuda.max_memory_reserved()
        if not is_kept:
            gc.collect()
            torch.cuda.empty_cache()
        return {"peak_bytes": peak, "rest_bytes": torch.cuda.memory_reserved()}
