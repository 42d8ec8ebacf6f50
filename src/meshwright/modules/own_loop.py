"""Somebody's own training loop on any number of ranks.

    run = meshwright.prepare(model, optimizer, loader, zero=2)
    for batch in run.loader:
        run.backward(loss_sum, count)
        run.step()
    run.end()

The module is changed in place and called as before. Everything after `backward` is the trainer's own step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.errors import MeshwrightError, SpecError
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.modules.build_training import build_loop_training, require_module
from meshwright.modules.loop_loader import LoopLoader
from meshwright.modules.module_program import ModuleProgram, require_pair
from meshwright.optim.user_optimizer import adopted_numbers, allocate, require_optimizer, restore_numbers
from meshwright.spec.modules import LoopSpec
from meshwright.spec.settings import read_settings, spread
from meshwright.train.build import seed_step
from meshwright.train.state import TrainState
from meshwright.train.step import Training, update
from meshwright.user_errors import errors_end_at_caller


@errors_end_at_caller
def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: Iterable[Any],
    *,
    run: str | Path | None = None,
    directory: str | Path | None = None,
    keep: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "OwnLoop":
    """Spread a loop over the ranks that torchrun started; plain Python is one rank.

    With a directory the loop saves there (`checkpoint={"every_steps": n}`, and at the end) and, started
    again, goes on from its last checkpoint. `keep` names what else to save, such as a scheduler: objects
    with `state_dict` and `load_state_dict`. `settings` are the fields of `LoopSpec`; `run` is a YAML file of
    them. `optimizer=None` goes with an update rule of ours: `optim={"kind": "muon", "lr": 1e-3}`.
    """
    spec = read_settings(LoopSpec, run, settings)
    _require_one_optimizer(optimizer, spec)
    require_module(model)
    _require_directory(directory, keep, spec)
    was_joined = dist.is_initialized()
    world = join_world(spec.device)
    try:
        spec = spread(spec, world.num_ranks)
        mesh = build_mesh(spec.parallel, world)
        training = build_loop_training(model, optimizer, spec, mesh)
        batches = LoopLoader(
            loader, seed=spec.seed, dp_rank=mesh.dp_rank, dp_size=spec.parallel.dp, device=mesh.device
        )
        user_state = _UserObjects(training, dict(keep or {}), is_adopted=optimizer is not None)
        saver = None
        if directory is not None:
            saver = Checkpoints(spec, Path(directory) / "checkpoints", training, batches, user_state)
        return OwnLoop(spec, mesh, training, batches, saver, leaves_world=not was_joined)
    except MeshwrightError:
        if not was_joined:
            leave_world()
        raise


def _require_one_optimizer(optimizer: torch.optim.Optimizer | None, spec: LoopSpec) -> None:
    if (optimizer is None) == (spec.optim is None):
        fact = "there is neither an optimizer nor optim" if optimizer is None else "there are two optimizers"
        hint = "give a torch optimizer, or None and optim={'kind': 'adamw', 'lr': 1e-3}"
        raise SpecError(fact, where="optimizer", hint=hint)
    if optimizer is not None:
        require_optimizer(optimizer)


def _require_directory(directory: str | Path | None, keep: Mapping[str, Any] | None, spec: LoopSpec) -> None:
    """What would be saved needs a place."""
    said = "keep" if keep else "checkpoint" if spec.checkpoint != type(spec.checkpoint)() else None
    if directory is None and said is not None:
        raise SpecError(
            f"{said} has no effect without a directory: nothing is saved",
            where=said,
            hint="prepare(..., directory='runs/x'), or leave it out",
        )


@dataclass(frozen=True)
class StepReport:
    """What a step did, over all ranks. Device tensors: reading them waits for the step."""

    number: int
    """Optimizer updates done, this one included."""
    loss: Tensor
    """Sum of all losses of the step / their count."""
    grad_norm: Tensor
    is_skipped: bool
    """fp16: the gradients overflowed, so no update was made."""


class OwnLoop:
    """The ranks of a loop, seen from one of them; every method is called by all."""

    def __init__(
        self,
        spec: LoopSpec,
        mesh: Mesh,
        training: Training,
        loader: LoopLoader,
        saver: Checkpoints | None,
        *,
        leaves_world: bool,
    ) -> None:
        assert isinstance(training.program, ModuleProgram)
        self.loader, self.device, self.is_first = loader, mesh.device, mesh.rank == 0
        self._spec, self._training, self._saver = spec, training, saver
        self._program, self._leaves_world = training.program, leaves_world
        self._num_backwards, self._is_due = 0, False
        self._state = _restored(saver)
        seed_step(spec.seed, self._state.num_batches)

    @property
    def epoch(self) -> int:
        """The epoch that the loader is in; after a resume, the one to go on with."""
        return self.loader.epoch

    @property
    def num_steps(self) -> int:
        """Optimizer updates done."""
        return self._state.step

    def backward(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Gradients of one batch, whose losses are summed, not averaged; `count` says how many there are."""
        loss_sum, count = require_pair((loss_sum, count))
        if not self.loader.is_counted:
            loss_sum, count = loss_sum * 0.0, count * 0.0
        self._num_backwards += 1
        self._is_due = self._num_backwards == self._spec.accumulation or self.loader.is_last
        self._program.backward(loss_sum, count, is_last=self._is_due, scale=self._training.scale)

    def step(self, learning_rate: float | None = None) -> StepReport | None:
        """Clip and update once `accumulation` batches (or the last of the epoch) are in; None before that.

        Without a rate the optimizer's own counts.
        """
        if self._num_backwards == 0:
            raise SpecError(
                "step() without a backward() before it: there are no gradients",
                where="step",
                hint="call run.backward(loss_sum, count) for every batch, in place of loss.backward()",
            )
        if not self._is_due:
            return None
        self._num_backwards, self._is_due = 0, False
        self._program.finish()
        grad_norm, is_sound = update(self._training, learning_rate=learning_rate)
        self._state = self._state.after_step(tokens=0) if is_sound else self._state.after_skip()
        seed_step(self._spec.seed, self._state.num_batches)
        every = self._spec.checkpoint.every_steps
        if self._saver is not None and is_sound and every and self._state.step % every == 0:
            self._saver.save(self._state)
        return StepReport(self._state.step, self._program.loss, grad_norm, is_skipped=not is_sound)

    def save(self) -> Path:
        """A checkpoint now."""
        if self._saver is None:
            raise SpecError(
                "there is no directory to save to", where="directory", hint="prepare(..., directory='runs/x')"
            )
        return self._saver.save(self._state)

    def end(self) -> None:
        """Save what was not saved yet, and leave the other ranks."""
        if self._saver is not None and self._saver.saved_step != self._state.step:
            self._saver.save(self._state)
        if self._leaves_world:
            leave_world()


def _restored(saver: Checkpoints | None) -> TrainState:
    saved = saver.restore() if saver else None
    return TrainState.from_facts(saved) if saved else TrainState()


class _UserObjects:
    """A brought optimizer's counts, and objects with a state of plain values."""

    def __init__(self, training: Training, keep: dict[str, Any], *, is_adopted: bool) -> None:
        self._training, self._keep, self._is_adopted = training, keep, is_adopted
        for name, thing in keep.items():
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise SpecError(
                    f"{type(thing).__name__} has no state_dict and load_state_dict",
                    where=f"keep.{name}",
                    hint="give an object that has both, such as a scheduler of torch",
                )
            _require_plain(name, thing.state_dict())

    def allocate(self) -> None:
        if self._is_adopted:
            allocate(self._training.optimizer)

    def state(self) -> dict[str, Any]:
        numbers = None
        if self._is_adopted:
            numbers = adopted_numbers(self._training.optimizer, self._training.named_shards)
        return {"optimizer": numbers, "keep": {name: one.state_dict() for name, one in self._keep.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._is_adopted:
            restore_numbers(self._training.optimizer, self._training.named_shards, state["optimizer"])
        for name, thing in self._keep.items():
            thing.load_state_dict(state["keep"][name])


def _require_plain(name: str, state: Any) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"its state is not made of plain values: {error}",
            where=f"keep.{name}",
            hint="only numbers, texts, lists and dicts are kept",
        ) from None
