"""A user's own training loop on any number of ranks.

    run = meshwright.prepare(model, optimizer, loader, zero=2)
    for batch in run.loader:
        run.backward(loss_sum, count)
        run.step()
    run.end()

The module is changed in place and called as before. Everything after `backward` is the same step as in
`train`.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.checkpoint.saver import SaveOutcome
from meshwright.data.loader import Loader
from meshwright.errors import MeshwrightError, SpecError
from meshwright.launch.parent import end_with_launcher
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.modules.advice import ModuleRun, print_advice
from meshwright.modules.build_training import build_loop_training, require_directory, require_module
from meshwright.modules.loop_guard import LoopGuard
from meshwright.modules.loop_loader import LoopLoader
from meshwright.modules.module_program import ModuleProgram, require_pair
from meshwright.modules.record_batches import RecordLoop, require_unsharded
from meshwright.modules.sample_reads import loop_readers
from meshwright.optim.user_optimizer import (
    allocate,
    require_optimizer,
    restore_user_state,
    user_state_numbers,
)
from meshwright.spec.keywords import LoopSettings
from meshwright.spec.modules import LoopSpec
from meshwright.spec.settings import read_settings, with_data_parallel
from meshwright.train import messages
from meshwright.train.build import seed_step
from meshwright.train.session import lock_directory, on_first_rank
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
    **settings: Unpack[LoopSettings],
) -> "OwnLoop":
    """Distribute a loop over the ranks that torchrun started; plain Python is one rank.

    With a directory the loop saves checkpoints there (`checkpoint={"every_steps": n}`, and at the end) and,
    started again, resumes from the last one. `keep` names other objects to save, such as a scheduler: objects
    with `state_dict` and `load_state_dict`. `settings` are the fields of `LoopSpec`; `run` is a YAML file of
    them. `optimizer=None` selects a built-in optimizer: `optim={"kind": "muon", "lr": 1e-3}`.
    """
    spec = read_settings(LoopSpec, run, settings)
    _require_one_optimizer(optimizer, spec)
    require_module(model)
    require_directory(directory)
    _require_directory(directory, keep, spec)
    at_end = ExitStack()
    if not dist.is_initialized():
        at_end.callback(leave_world)
    end_with_launcher()
    run_dir = Path(directory) if directory is not None else None
    world = join_world(spec.device, launch=spec.launch, run_dir=run_dir)
    try:
        spec = with_data_parallel(spec, world.num_ranks)
        mesh = build_mesh(spec.parallel, world)
        if world.is_first:
            print_advice(ModuleRun(model, spec), mesh.device)
        training = build_loop_training(model, optimizer, spec, mesh)
        batches = _distributed(loader, spec, mesh)
        user_state = _UserObjects(training, dict(keep or {}), has_user_optimizer=optimizer is not None)
        saver = None
        if directory is not None:
            on_first_rank(lambda: lock_directory(Path(directory), at_end))
            saver = Checkpoints(spec, Path(directory) / "checkpoints", training, batches, user_state)
            at_end.enter_context(saver)
        return OwnLoop(spec, mesh, training, batches, saver, at_end=at_end)
    except MeshwrightError:
        at_end.close()
        raise


def _distributed(loader: Iterable[Any], spec: LoopSpec, mesh: Mesh) -> LoopLoader | RecordLoop:
    """This rank's part of a loader; one of `open_loader` is divided within each global batch."""
    sharing = loop_readers(loader, spec, mesh)
    if isinstance(loader, Loader):
        require_unsharded(loader)
        share = loader.for_rank(mesh.dp_rank, spec.parallel.dp, sharing=sharing)
        return RecordLoop(share, device=mesh.device)
    dp = {"dp_rank": mesh.dp_rank, "dp_size": spec.parallel.dp}
    return LoopLoader(loader, seed=spec.seed, **dp, device=mesh.device, sharing=sharing)


def _require_one_optimizer(optimizer: torch.optim.Optimizer | None, spec: LoopSpec) -> None:
    if (optimizer is None) == (spec.optim is None):
        state = "neither optimizer nor optim is" if optimizer is None else "both optimizer and optim are"
        hint = "pass a torch optimizer, or None and optim={'kind': 'adamw', 'lr': 1e-3}"
        raise SpecError(f"{state} set", where="optimizer", hint=hint)
    if optimizer is not None:
        require_optimizer(optimizer)


def _require_directory(directory: str | Path | None, keep: Mapping[str, Any] | None, spec: LoopSpec) -> None:
    """Refuse settings that save something where no directory is set."""
    setting = "keep" if keep else "checkpoint" if spec.checkpoint != type(spec.checkpoint)() else None
    if directory is None and setting is not None:
        raise SpecError(
            f"{setting} has no effect without a directory: nothing is saved",
            where=setting,
            hint="prepare(..., directory='runs/x'), or leave it out",
        )


@dataclass(frozen=True)
class StepReport:
    """The result of a step over all ranks. Its tensors are on the device: reading them waits for the step."""

    number: int
    """Optimizer updates so far, this one included."""
    loss: Tensor
    """Sum of all losses of the step / their count."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    is_skipped: bool
    """Whether the update was skipped because fp16 gradients overflowed."""


class OwnLoop:
    """A user's loop on one of its ranks; all ranks call every method."""

    def __init__(
        self,
        spec: LoopSpec,
        mesh: Mesh,
        training: Training,
        loader: LoopLoader | RecordLoop,
        saver: Checkpoints | None,
        *,
        at_end: ExitStack,
    ) -> None:
        assert isinstance(training.program, ModuleProgram)
        self.loader, self.device, self.is_first = loader, mesh.device, mesh.rank == 0
        self._spec, self._training, self._saver = spec, training, saver
        self._program, self._at_end = training.program, at_end
        self._num_backwards, self._is_due = 0, False
        self._state = _restored(saver)
        self._guard = loader.guard = LoopGuard(training.optimizer)
        seed_step(spec.seed, self._state.num_batches)

    @property
    def epoch(self) -> int:
        """The epoch of the loader; after a resume, the epoch to continue with."""
        return self.loader.epoch

    @property
    def num_steps(self) -> int:
        """Optimizer updates so far."""
        return self._state.step

    def backward(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Compute the gradients of one batch; `loss_sum` is the sum, not the mean, of `count` losses."""
        loss_sum, count = require_pair((loss_sum, count))
        if not self.loader.is_counted:
            loss_sum, count = loss_sum * 0.0, count * 0.0
        self._num_backwards += 1
        self._guard.num_backwards += 1
        self._is_due = self._num_backwards == self._spec.accumulation or self.loader.is_last
        self._program.backward(loss_sum, count, is_last=self._is_due, scale=self._training.scale)

    def step(self, learning_rate: float | None = None) -> StepReport | None:
        """Clip and update after `accumulation` batches (or the last of the epoch); before that return None.

        Without a learning rate the optimizer uses its own.
        """
        if self._num_backwards == 0:
            raise SpecError(
                "step() without a backward() before it: there are no gradients",
                where="step",
                hint="call run.backward(loss_sum, count) for every batch, in place of loss.backward()",
            )
        self._guard.num_steps += 1
        if not self._is_due:
            return None
        self._num_backwards, self._is_due = 0, False
        self._program.finish()
        with self._guard.our_update():
            grad_norm, is_sound = update(self._training, learning_rate=learning_rate)
        self._state = self._state.after_step(tokens=0) if is_sound else self._state.after_skip()
        seed_step(self._spec.seed, self._state.num_batches)
        if self._saver is not None and is_sound:
            self._save_on_the_way(self._saver)
        return StepReport(self._state.step, self._program.loss, grad_norm, is_skipped=not is_sound)

    def save(self) -> Path:
        """Save a checkpoint now."""
        if self._saver is None:
            raise SpecError(
                "there is no directory to save to", where="directory", hint="prepare(..., directory='runs/x')"
            )
        return _published(self._saver.save(self._state)[-1])

    def _save_on_the_way(self, saver: Checkpoints) -> None:
        """Start a save where one is due; one that fails is printed, and the loop goes on."""
        ended = saver.start_save(self._state) if saver.is_due(self._state.step) else saver.poll()
        for outcome in ended:
            if outcome.error is not None and self.is_first:
                print(messages.save_failed(outcome.step, outcome.error), file=sys.stderr)
        uploaded = saver.poll_upload()
        if uploaded is not None and uploaded.error is not None and self.is_first:
            print(messages.upload_failed(uploaded.step_name, uploaded.error), file=sys.stderr)

    def end(self) -> None:
        """Save a last checkpoint if needed, and leave the process group; refuses a loop without a step."""
        self._guard.require_training()
        if self._saver is not None:
            self._saver.wait()
            if self._saver.saved_step != self._state.step:
                _published(self._saver.save(self._state)[-1])
            uploaded = self._saver.finish_upload()
            if uploaded is not None and uploaded.error is not None:
                raise messages.last_upload_failed(uploaded.error, self._saver.root)
        self._at_end.close()


def _published(outcome: SaveOutcome) -> Path:
    if outcome.error is not None:
        raise outcome.error
    assert outcome.folder is not None
    return outcome.folder


def _restored(saver: Checkpoints | None) -> TrainState:
    saved = saver.restore() if saver else None
    if saver is not None and dist.get_rank() == 0:
        for change in saver.changes:
            print(f"changed: {change}", file=sys.stderr)
    return TrainState.from_facts(saved) if saved else TrainState()


class _UserObjects:
    """The user's optimizer and the `keep` objects, whose state is plain values."""

    def __init__(self, training: Training, keep: dict[str, Any], *, has_user_optimizer: bool) -> None:
        self._training, self._keep, self._has_user_optimizer = training, keep, has_user_optimizer
        for name, thing in keep.items():
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise SpecError(
                    f"{type(thing).__name__} has no state_dict and load_state_dict",
                    where=f"keep.{name}",
                    hint="pass an object that has both, such as a torch scheduler",
                )
            _require_plain(name, thing.state_dict())

    def allocate(self) -> None:
        if self._has_user_optimizer:
            allocate(self._training.optimizer)

    def state(self) -> dict[str, Any]:
        numbers = None
        if self._has_user_optimizer:
            numbers = user_state_numbers(self._training.optimizer, self._training.named_shards)
        return {"optimizer": numbers, "keep": {name: one.state_dict() for name, one in self._keep.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._has_user_optimizer:
            restore_user_state(self._training.optimizer, self._training.named_shards, state["optimizer"])
        for name, thing in self._keep.items():
            thing.load_state_dict(state["keep"][name])


def _require_plain(name: str, state: Any) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"its state_dict is not JSON: {error}",
            where=f"keep.{name}",
            hint="only numbers, strings, lists and dicts can be saved",
        ) from None
