"""Times the steps of a contender that stays alive: warm-up, then one window for each command to time.

The contender's loop calls `after_step` at the end of each step. Between windows that call blocks, and memory
that only a running step needs is freed.
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


class WorkerClock:
    """The clock of one contender's process."""

    def __init__(self, device: torch.device, channel: Channel, *, warmup_steps: int) -> None:
        self.accumulation_factor = 1
        """Micro-batches of the next step, as a multiple of the usual number."""
        self.compile_seconds = 0.0
        self._device, self._channel, self._warmup_steps = device, channel, max(1, warmup_steps)
        self._started_at = time.perf_counter()
        self._waited_seconds = 0.0
        self._stages = self._run()
        next(self._stages)

    def wait_for_device(self) -> None:
        """Report that everything is compiled, and block until the device may be used."""
        asked_at = time.perf_counter()
        self._channel.send(state="compiled")
        self._channel.receive()
        self._waited_seconds += time.perf_counter() - asked_at

    def after_step(self, loss: Tensor) -> bool:
        """Note that a step has been launched; False when nothing more is to be measured."""
        try:
            self._stages.send(loss)
        except StopIteration:
            return False
        return True

    def _run(self) -> Generator[None, Tensor, None]:
        first_loss = float((yield).detach())
        first_seconds = time.perf_counter() - self._started_at - self._waited_seconds
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the first step's peak may be the compiler's
        for _ in range(self._warmup_steps):
            started_at = time.perf_counter()
            yield
            synchronize(self._device)
            # Other contenders may warm up at the same time: corrected before the first window.
            step_seconds = self._step_seconds = time.perf_counter() - started_at
        self._channel.send(
            state="ready",
            first_loss=first_loss,
            compile_seconds=max(self.compile_seconds, first_seconds - step_seconds),
            facts=machine_facts(self._device),
            **self._memory(),
        )
        while (message := self._channel.receive())["command"] == "time":
            yield from self._time(message)

    def _time(self, message: dict[str, Any]) -> Generator[None, Tensor, None]:
        for _ in range(message["lead_steps"]):
            started_at = time.perf_counter()
            yield
            synchronize(self._device)
            self._step_seconds = min(self._step_seconds, time.perf_counter() - started_at)
        self.accumulation_factor = message["accumulation_factor"]
        step_seconds = self._step_seconds * self.accumulation_factor
        num_steps = steps_in(message["seconds"], step_seconds, fewest=message["fewest_steps"])
        window = TimedWindow(self._device, num_steps=num_steps)
        while window.after_step((yield)):
            pass
        row = window.result()
        self._step_seconds = row["step_seconds"] / self.accumulation_factor
        if message["is_profiled"] and self._device.type == "cuda":
            row |= yield from self._profiled()
        self.accumulation_factor = 1
        self._channel.send(state="timed", row=row, **self._memory(keep=message["keeps_memory"]))

    def _profiled(self) -> Generator[None, Tensor, dict[str, Any]]:
        with kernel_recorder() as recorded:
            yield
            synchronize(self._device)
        return kernel_rows(budget_of(kernels_of(recorded), num_steps=1))

    def _memory(self, *, keep: bool = False) -> dict[str, int]:
        """Reserved bytes at the peak and when idle; unused memory is freed first, unless `keep`."""
        if self._device.type != "cuda":
            return {"peak_bytes": 0, "idle_bytes": 0}
        peak = torch.cuda.max_memory_reserved()
        if not keep:
            gc.collect()
            torch.cuda.empty_cache()
        return {"peak_bytes": peak, "idle_bytes": torch.cuda.memory_reserved()}
