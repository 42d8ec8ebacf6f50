"""What the step is doing: forward or backward of which block and micro-batch, or the update.

Forward hooks tell which module runs; a hook on its output tells when its backward begins. Neither changes
what autograd keeps.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.rehearse.ledger import Ledger
from meshwright.train.step import Training

HALVES = {"attention_norm": "attention", "attention": "attention", "mlp_norm": "mlp", "mlp": "mlp"}
"""Which half of a block each of its modules belongs to."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """One stretch of a step."""

    phase: str
    """build, forward, backward, reduce, update."""
    part: str = ""
    """The module: `blocks.3`, `head`, `loss`, `embedding`."""
    microbatch: int | None = None
    step: int = -1

    def __str__(self) -> str:
        where = f" of {self.part}" if self.part else ""
        which = "" if self.microbatch is None else f", micro-batch {self.microbatch}"
        return f"{self.phase}{where}{which}"


class Moments:
    """The moments of a trace, in the order they were first met; the ledger holds the present one's number."""

    def __init__(self, ledger: Ledger, *, by_half: bool = False) -> None:
        self.by_half = by_half
        """Whether a block's attention and MLP are phases of their own: `blocks.3/attention`, `blocks.3/mlp`."""
        self.seen: list[Moment] = [Moment("build")]
        self._ledger = ledger
        self._step = -1
        self._calls: dict[int, int] = {}

    def enter(self, phase: str, part: str = "", microbatch: int | None = None) -> None:
        """From now on this happens."""
        self.seen.append(Moment(phase, part, microbatch, self._step))
        self._ledger.moment = len(self.seen) - 1

    def begin_step(self) -> None:
        """Micro-batches count from 0 again."""
        self._step += 1
        self._calls = {}
        self.enter("forward")

    @contextlib.contextmanager
    def following(self, training: Training) -> Iterator[None]:
        """Inside, the modules of a program and its optimizer say what they do."""
        handles: list[Any] = []
        for stage in training.program.stages:
            handles.append(stage.register_forward_pre_hook(self._count_call, prepend=True))
            for name, part in _parts(stage):
                begin = partial(self._forward, stage, name)
                handles.append(part.register_forward_pre_hook(begin, prepend=True))
                handles.append(part.register_forward_hook(partial(self._after, stage, name)))
                if self.by_half and name.startswith("blocks."):
                    handles += self._follow_halves(part)
        optimizer = training.optimizer
        handles.append(optimizer.register_step_pre_hook(lambda *_: self.enter("update")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow_halves(self, block: nn.Module) -> Iterator[Any]:
        for name, half in HALVES.items():
            module = getattr(block, name)
            yield module.register_forward_pre_hook(partial(self._half_begins, half), prepend=True)
            yield module.register_forward_hook(partial(self._half_ends, half))

    def _half_begins(self, half: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter_half(half)

    def _half_ends(self, half: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and output.requires_grad and not self._is_recomputing():
            output.register_hook(lambda _: self.enter_half(half))

    def enter_half(self, half: str) -> None:
        """From now on this half of the present block runs; forward, backward or recomputed."""
        now = self.seen[self._ledger.moment]
        if now.part.startswith("blocks."):
            self.enter(now.phase, f"{now.part.split('/')[0]}/{half}", now.microbatch)

    def _count_call(self, stage: nn.Module, inputs: Any) -> None:
        self._calls[id(stage)] = self._calls.get(id(stage), -1) + 1

    def _now(self, stage: nn.Module) -> int:
        return self._calls[id(stage)]

    def _forward(self, stage: nn.Module, name: str, *_: Any) -> None:
        if self._is_recomputing():
            return
        self.enter("forward", name, self._now(stage))

    def _after(self, stage: nn.Module, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_recomputing() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        microbatch = self._now(stage)
        output.register_hook(lambda _: self.enter("backward", name, microbatch))
        self.enter("forward", f"after {name}" if name != "loss" else "", microbatch)

    def _is_recomputing(self) -> bool:
        return torch._C._current_graph_task_id() != -1


def _parts(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a person knows the model by."""
    for name, module in stage.named_children():
        if isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield from ((f"{name}.{key}", block) for key, block in module.named_children())
        else:
            yield name, module
