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
from meshwright.rehearse.torch_pipelining import weight_passes_reported
from meshwright.train.step import Training

PARTS = {"attention_norm": "attention", "attention": "attention", "mlp_norm": "mlp", "mlp": "mlp"}
"""Which part of a block each of its modules belongs to; attention has a `core` and an `output` inside."""
WEIGHT_PASS = "weights"
"""The part of a phase in which a split backward computes weight gradients."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step. Its str() is what reports print."""

    kind: str
    """build, forward, backward or update."""
    part: str = ""
    """Name of the module: `blocks.3`, `head`, `loss`; `after blocks.3` until the next one begins; or
    WEIGHT_PASS."""
    microbatch: int | None = None
    step: int = -1

    def __str__(self) -> str:
        where = f" of {self.part}" if self.part else ""
        which = "" if self.microbatch is None else f", micro-batch {self.microbatch}"
        return f"{self.kind}{where}{which}"


class PhaseTracker:
    """Lists the phases of a trace as the step enters them, and sets the current one in the allocation log."""

    def __init__(self, allocations: AllocationLog, *, by_part: bool = False) -> None:
        self.by_part = by_part
        """Whether the parts of a block are phases of their own: `blocks.3/attention`, `blocks.3/mlp`."""
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
                if self.by_part and name.startswith("blocks."):
                    handles += self._track_parts(part)
        optimizer = training.optimizer
        handles.append(optimizer.register_step_pre_hook(lambda *_: self.enter("update")))
        try:
            with weight_passes_reported(partial(self.enter, "backward", WEIGHT_PASS)):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _track_parts(self, block: nn.Module) -> Iterator[Any]:
        for name, part in PARTS.items():
            module = getattr(block, name)
            yield module.register_forward_pre_hook(partial(self._part_begins, part), prepend=True)
            end = "output" if name == "attention" else part
            yield module.register_forward_hook(partial(self._part_ends, end, end))
        core = block.get_submodule("attention.attend")
        yield core.register_forward_pre_hook(self._core_begins, prepend=True)
        yield core.register_forward_hook(partial(self._part_ends, "core", "output"))

    def _part_begins(self, part: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter_part(part)

    def _core_begins(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Queries, keys and values begin the backward of what made them when they have gradients."""
        if torch.compiler.is_compiling():
            return
        self.enter_part("core")
        for one in inputs:
            if one.requires_grad and not is_in_backward():
                one.register_hook(lambda _: self.enter_part("attention"))

    def _part_ends(self, part: str, following: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """The part's backward begins with the gradient of its output; `following` comes after its forward."""
        if torch.compiler.is_compiling():
            return
        if output.requires_grad and not is_in_backward():
            output.register_hook(lambda _: self.enter_part(part))
        if following != part:
            self.enter_part(following)

    def enter_part(self, part: str) -> None:
        """Begin a part of the current block: in its forward, its backward or its recompute."""
        now = self.entered[self._ledger.phase_id]
        if now.part.startswith("blocks."):
            self.enter(now.kind, f"{now.part.split('/')[0]}/{part}", now.microbatch)

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
