"""The checkpoints of a run: which tensors and values are saved, and how they are restored."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import __version__
from meshwright.checkpoint.adapters import adapter_of, base_record, require_same_base, saved_shards
from meshwright.checkpoint.live import DataPosition, Fp8Fallback, LiveTraining, Progress, UserState
from meshwright.checkpoint.load import (
    complete_checkpoints,
    load_tensors,
    read_manifest,
    saved_shapes,
    verify_files,
)
from meshwright.checkpoint.retain import keep_last
from meshwright.checkpoint.save import MANIFEST, on_all_ranks, save_checkpoint
from meshwright.errors import CheckpointError, DataError
from meshwright.memory.offload.host import synchronize
from meshwright.optim.build import (
    master_weights,
    set_master_weights,
    set_num_updates,
    state_dims,
    state_tensors,
)
from meshwright.optim.user_optimizer import user_state_tensors
from meshwright.spec import RunSpec
from meshwright.spec.changes import Change, changed_settings, refused_changes
from meshwright.spec.modules import FitSpec, LoopSpec

SavedSpec = RunSpec | FitSpec | LoopSpec
"""The spec that a checkpoint keeps: of a run file, of `fit`, or of a user's own loop."""


def weight_tensors(training: LiveTraining) -> dict[str, Tensor]:
    """The weights and persistent buffers, under their names in checkpoints.

    They share storage with the model, except weights whose lower bits the optimizer keeps: these are fp32
    copies, so that a checkpoint has the exact values; `set_loaded_masters` writes loaded ones back.
    """
    program, masters = training.program, master_weights(training.optimizer, training.named_shards)
    tensors: dict[str, Tensor] = {
        f"model.{one.name}": one.as_global(masters.get(one.name, one.shard)) for one in program.shards
    }
    for stage in program.stages:
        persistent = set(stage.state_dict()) - {name for name, _ in stage.named_parameters()}
        buffers = {name: buffer for name, buffer in stage.named_buffers() if name in persistent}
        tensors |= {f"buffers.{name}": buffer for name, buffer in buffers.items()}
    return tensors


def set_loaded_masters(training: LiveTraining, tensors: Mapping[str, Tensor]) -> None:
    """After loading into `weight_tensors`: write its fp32 copies back as weights and lower bits."""
    loaded = {
        name: tensor.to_local()
        for name in master_weights(training.optimizer, training.named_shards)
        if isinstance(tensor := tensors[f"model.{name}"], DTensor)
    }
    set_master_weights(training.optimizer, training.named_shards, loaded)


def all_tensors(run: SavedSpec, training: LiveTraining) -> dict[str, Tensor]:
    """Weights, optimizer states and averages as shards of full tensors, in the storage of the training.

    With adapters the frozen base is left out: a checkpoint records where it is (`checkpoint/adapters.py`).
    """
    synchronize(training.device)  # what offload is still sending to the host
    shards = {one.name: one for one in training.program.shards}
    tensors = weight_tensors(training)
    if adapter_of(run) is not None:
        saved = {f"model.{one.name}" for one in saved_shards(run, training)}
        tensors = {name: tensor for name, tensor in tensors.items() if name in saved}
    for name, states in _optimizer_tensors(run, training).items():
        one = shards[name]
        tensors |= {
            f"optim.{name}.{key}": one.as_global(value, state_dims(key, len(one.shape)))
            for key, value in states.items()
        }
    if training.ema is not None:
        averages = training.ema.averages.items()
        tensors |= {f"ema.{name}": shards[name].as_global(average) for name, average in averages}
    if training.fp8_scales is not None:
        tensors |= training.fp8_scales.tensors()
    return tensors


def _optimizer_tensors(run: SavedSpec, training: LiveTraining) -> dict[str, dict[str, Tensor]]:
    if run.optim is None:
        return user_state_tensors(training.optimizer, training.named_shards)
    return state_tensors(training.optimizer, training.named_shards, run.optim)


def without_unsaved_fp8_histories(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors without histories of fp8 scales that the checkpoint does not have.

    It may be of a run with another recipe; a linear layer without a saved history begins one.
    """
    saved = saved_shapes(folder)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("fp8.") or saved.get(name) == tuple(tensor.shape)
    }


def without_new_averages(tensors: Mapping[str, Tensor], saved: set[str]) -> dict[str, Tensor]:
    """The tensors without averages of weights, where a checkpoint has none: they begin at its weights."""
    if any(name.startswith("ema.") for name in saved):
        return dict(tensors)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("ema.")}


class Checkpoints:
    """The checkpoints of one run; every method is called by all ranks."""

    def __init__(
        self,
        run: SavedSpec,
        root: Path,
        training: LiveTraining,
        batches: DataPosition,
        user_state: UserState | None = None,
        fp8_fallback: Fp8Fallback | None = None,
    ) -> None:
        self.run, self.root, self.training, self.batches = run, root, training, batches
        self.user_state, self.fp8_fallback = user_state, fp8_fallback
        self.saved_step: int | None = None
        self.damaged: list[Path] = []
        """Checkpoints that `restore` skipped."""
        self.changes: list[Change] = []
        """Settings that differ from those of the restored checkpoint."""
        self.restarts_data = False
        """Whether the data begins anew after `restore`, because the run has other samples."""
        self._base = on_all_ranks(lambda: base_record(run)) if isinstance(run, RunSpec) else None

    def save(self, progress: Progress) -> Path:
        """Save everything, and delete checkpoints beyond `keep_last`; returns the folder."""
        with self.training.weights.all_on_device():
            tensors = all_tensors(self.run, self.training)
            folder = save_checkpoint(
                self.root, step=progress.step, tensors=tensors, facts=self._facts(progress)
            )
        self.saved_step = progress.step
        if dist.get_rank() == 0:
            keep_last(self.root, self.run.checkpoint.keep_last)
        return folder

    def restore(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint of this run; returns its progress, None where there is none.

        A damaged one is skipped and named on stderr. Where all are damaged, the newest one's error is raised.
        """
        found = self._newest_intact()
        if found is None:
            return None
        folder, manifest = found
        require_same_base(manifest.get("base"), self._base, folder)
        if self.user_state is not None:
            self.user_state.allocate()
        with self.training.weights.all_on_device(changing=True):
            tensors = all_tensors(self.run, self.training)
            saved = set(saved_shapes(folder))
            load_tensors(folder, without_new_averages(without_unsaved_fp8_histories(tensors, folder), saved))
            set_loaded_masters(self.training, tensors)
            if self.training.ema is not None and not any(name.startswith("ema.") for name in saved):
                self.training.ema.restart()
            self.training.program.gather_parameters()
            if self.training.fp8_scales is not None:
                self.training.fp8_scales.set_scales()
        with damage_reported(folder / MANIFEST):
            return self._restore_facts(manifest)

    def _newest_intact(self) -> tuple[Path, dict[str, Any]] | None:
        first_error: CheckpointError | None = None
        for folder in reversed(complete_checkpoints(self.root)):
            try:
                manifest = on_all_ranks(lambda folder=folder: read_manifest(folder))
                verify_files(folder, manifest)
            except CheckpointError as error:
                first_error = first_error or error
                self.damaged.append(folder)
                if dist.get_rank() == 0:
                    print(f"note: {folder} is skipped: {error.fact}", file=sys.stderr)
                continue
            with damage_reported(folder / MANIFEST):
                self.changes = allowed_changes(self.run, manifest["run"], folder)
            return folder, manifest
        if first_error is not None:
            raise first_error
        return None

    def _facts(self, progress: Progress) -> dict[str, Any]:
        scale = self.training.loss_scale
        return {
            "name": self.run.name,
            "state": progress.to_facts(),
            "data": self.batches.state(),
            "user_state": self.user_state.state() if self.user_state else None,
            "loss_scale": scale.state() if scale else None,
            "fp8_fallback_layers": self.fp8_fallback.fallback_layers if self.fp8_fallback else [],
            "base": self._base,
            "trajectory": self.run.trajectory_fingerprint(),
            "run": self.run.model_dump(mode="json"),
            "versions": {"meshwright": __version__, "torch": torch.__version__},
        }

    def _restore_facts(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        training, progress = self.training, _require_progress(manifest)
        if self.run.optim is not None:
            step = progress["step"]
            set_num_updates(training.optimizer, training.named_shards, self.run.optim, num_updates=step)
        # Checkpoints of earlier versions do not count batches.
        num_batches = progress["step"] + progress["num_skipped"]
        self._restore_data({"num_batches": num_batches, **manifest["data"]})
        if self.user_state is not None:
            self.user_state.load_state(manifest["user_state"])
        if training.loss_scale is not None and manifest["loss_scale"] is not None:
            training.loss_scale.load_state(manifest["loss_scale"])
        if self.fp8_fallback is not None and _recipe(manifest["run"]) == self.fp8_fallback.recipe:
            # A run that changes its recipe starts without fallbacks.
            self.fp8_fallback.restore(manifest["fp8_fallback_layers"])
        self.saved_step = progress["step"]
        return progress

    def _restore_data(self, state: dict[str, Any]) -> None:
        """Continue at the saved position; with other settings of the data, other samples begin anew."""
        try:
            self.batches.load_state(state)
        except DataError:
            if not any(change.is_of_data for change in self.changes):
                raise
            self.batches.restart(state)
            self.restarts_data = True


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Inside, values of a manifest that are missing or of another type are an error of that file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the manifest is damaged: {type(error).__name__}: {error}",
            where=str(path),
            hint="use an older checkpoint: delete this folder",
        ) from None


def _require_progress(manifest: Mapping[str, Any]) -> dict[str, Any]:
    progress = manifest["state"]
    numbers = all(value is None or type(value) in (int, float) for value in progress.values())
    if not numbers or progress["step"] != manifest["step"]:
        raise ValueError(f"its progress is {progress!r}")
    return progress


def _recipe(saved: Mapping[str, Any]) -> str | None:
    return (saved["precision"].get("fp8") or {}).get("recipe")


def allowed_changes(run: SavedSpec, saved: Mapping[str, Any], where: Path) -> list[Change]:
    """The settings that differ from those of a saved run; refuses a change that its state contradicts."""
    changes = changed_settings(saved, run)
    refused = refused_changes(changes, run)
    if not refused:
        return changes
    named = "; ".join(f"{change} ({reason})" for change, reason in refused[:3])
    raise CheckpointError(
        f"this directory has another run: {named}",
        where=str(where),
        hint="set it back, or train into another directory (--dir) with checkpoint.start_from, which takes "
        "the weights alone"
        if isinstance(run, RunSpec)
        else "set it back, or name another directory and take the weights with meshwright.load_weights",
    )
