"""How long a rank waits for the collectives of FSDP2, measured with hooks around those of FSDP2.

FSDP2 waits for the all-gather of a unit in hooks before its forward and before its backward, and on gloo for
the reduce-scatter after its backward:

    forward     [begin] FSDP2: wait for the all-gather [end] -> forward of the unit
    backward    [begin] FSDP2: wait for the all-gather [end] -> backward of the unit
                [begin] FSDP2: launch the reduce-scatter (gloo: and wait for it) [end]

On CUDA begin and end are events on the stream that computes, so copies out of the gathered buffer count as
well. The reduce-scatter after the last unit is not in it. A unit that is compiled has no such hooks: its
compiler would trace them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.wait_clock import Mark, WaitClock


def measure_waits(roots: Sequence[nn.Module], device: torch.device) -> WaitClock:
    """The clock of the waits of all units of these modules, from now on."""
    clock = WaitClock(device)
    waits = _Waits(clock)
    for root in roots:
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                waits.attach(unit)
    return clock


class _Waits:
    """One wait at a time: the reduce-scatter of a unit goes over into the all-gather of the one before."""

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._begun: Mark | None = None

    def attach(self, unit: nn.Module) -> None:
        """Place hooks before and after those that FSDP2 has placed."""
        unit.register_forward_pre_hook(self._before_gather, prepend=True)
        unit.register_forward_pre_hook(self._after_gather)
        unit.register_forward_hook(partial(self._on_output, self._begin), prepend=True)
        unit.register_forward_hook(partial(self._on_output, self._end))

    def _before_gather(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        _hook_first(inputs, self._end)  # FSDP2 passes this gradient on after the reduce-scatter
        self._begin()

    def _after_gather(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._end()
        _hook_first(inputs, self._begin)

    def _on_output(self, mark: Callable[..., None], _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        _hook_first((output,), mark)

    def _begin(self, _: Tensor | None = None) -> None:
        if self._begun is None:
            self._begun = self._clock.mark()

    def _end(self, _: Tensor | None = None) -> None:
        if self._begun is not None:
            self._clock.add_since(self._begun)
            self._begun = None


def _hook_first(values: tuple[Any, ...], hook: Callable[..., None]) -> None:
    """Call `hook` when the gradient of the first tensor that has one is known."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            value.register_hook(hook)
            return
