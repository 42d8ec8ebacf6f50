"""The phases of a step: forward or backward of one module and micro-batch, or the optimizer's update.

A forward pre-hook marks where a module begins; a hook on its output marks where its backward begins. Neither
changes what autograd saves for backward.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.rehearse.allocation_log import AllocationLog
from meshwright.rehearse.torch_backward import is_in_backward
from meshwright.train.step import Training

HALVES = {"attention_norm": "attention", "attention": "attention", "mlp_norm": "mlp", "mlp": "mlp"}
"""Which half of a block each of its modules belongs to."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step. Its str() is what reports print."""

    kind: str
    """build, forward, backward or update."""
    part: str = ""
    """Name of the module: `blocks.3`, `head`, `loss`; `after blocks.3` until the next one begins."""
    microbatch: int | None = None
    step: int = -1

    def __str__(self) -> str:
        where = f" of {self.part}" if self.part else ""
        which = "" if self.microbatch is None else f", micro-batch {self.microbatch}"
        return f"{self.kind}{where}{which}"


class PhaseTracker:
    """Lists the phases of a trace as the step enters them, and sets the current one in the allocation log."""

    def __init__(self, allocations: AllocationLog, *, by_half: bool = False) -> None:
        self.by_half = by_half
        """Whether the halves of a block are phases of their own: `blocks.3/attention`, `blocks.3/mlp`."""
        self.entered: list[Phase] = [Phase("build")]
        self._ledger = allocations
        self._step = -1
        self._calls: dict[int, int] = {}

    def enter(self, kind: str, part: str = "", microbatch: int | None = None) -> None:
        """Begin a phase; it lasts until the next one is entered."""
        self.entered.append(Phase(kind, part, microbatch, self._step))
        self._ledger.phase_id = len(self.entered) - 1

    def begin_step(self) -> None:
        """Begin a step: micro-batches count from 0 again."""
        self._step += 1
        self._calls = {}
        self.enter("forward")

    @contextlib.contextmanager
    def tracking(self, training: Training) -> Iterator[None]:
        """Inside, hooks on the program's modules and on its optimizer enter the phases."""
        handles: list[Any] = []
        for stage in training.program.stages:
            handles.append(stage.register_forward_pre_hook(self._count_call, prepend=True))
            for name, part in _parts(stage):
                begin = partial(self._forward, stage, name)
                handles.append(part.register_forward_pre_hook(begin, prepend=True))
                handles.append(part.register_forward_hook(partial(self._after, stage, name)))
                if self.by_half and name.startswith("blocks."):
                    handles += self._track_halves(part)
        optimizer = training.optimizer
        handles.append(optimizer.register_step_pre_hook(lambda *_: self.enter("update")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _track_halves(self, block: nn.Module) -> Iterator[Any]:
        for name, half in HALVES.items():
            module = getattr(block, name)
            yield module.register_forward_pre_hook(partial(self._half_begins, half), prepend=True)
            yield module.register_forward_hook(partial(self._half_ends, half))

    def _half_begins(self, half: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter_half(half)

    def _half_ends(self, half: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and output.requires_grad and not is_in_backward():
            output.register_hook(lambda _: self.enter_half(half))

    def enter_half(self, half: str) -> None:
        """Begin a half of the current block: in its forward, its backward or its recompute."""
        now = self.entered[self._ledger.phase_id]
        if now.part.startswith("blocks."):
            self.enter(now.kind, f"{now.part.split('/')[0]}/{half}", now.microbatch)

    def _count_call(self, stage: nn.Module, inputs: Any) -> None:
        self._calls[id(stage)] = self._calls.get(id(stage), -1) + 1

    def _now(self, stage: nn.Module) -> int:
        return self._calls[id(stage)]

    def _forward(self, stage: nn.Module, name: str, *_: Any) -> None:
        if is_in_backward():
            return
        self.enter("forward", name, self._now(stage))

    def _after(self, stage: nn.Module, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_in_backward() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        microbatch = self._now(stage)
        output.register_hook(lambda _: self.enter("backward", name, microbatch))
        self.enter("forward", f"after {name}" if name != "loss" else "", microbatch)


def _parts(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a phase is named after: children of the stage, and each block by itself."""
    for name, module in stage.named_children():
        if isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield from ((f"{name}.{key}", block) for key, block in module.named_children())
        else:
            yield name, module
