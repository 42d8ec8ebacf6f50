"""Between a run's live tensors and its checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import __version__
from meshwright.checkpoint.live import Fp8Fallback, LiveTraining, Progress, Resumable, UserState
from meshwright.checkpoint.load import (
    complete_checkpoints,
    load_tensors,
    read_manifest,
    saved_shapes,
    verify_files,
)
from meshwright.checkpoint.retain import keep_last
from meshwright.checkpoint.save import save_checkpoint
from meshwright.errors import CheckpointError
from meshwright.memory.offload.host import settle
from meshwright.optim.build import (
    master_weights,
    set_master_weights,
    set_num_updates,
    state_dims,
    state_tensors,
)
from meshwright.optim.user_optimizer import adopted_tensors
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec, LoopSpec

SavedSpec = RunSpec | FitSpec | LoopSpec
"""What a checkpoint says it is of."""


def weight_tensors(training: LiveTraining) -> dict[str, Tensor]:
    """The weights and persistent buffers, under the names that checkpoints give them.

    In the live storage, except weights whose lower bits the optimizer keeps: these are fp32 copies, so that
    a checkpoint has the exact values whatever the format; `take_masters` puts loaded ones back.
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


def take_masters(training: LiveTraining, tensors: Mapping[str, Tensor]) -> None:
    """After `weight_tensors` were loaded into: fp32 copies become weights and lower bits."""
    loaded = {
        name: tensor.to_local()
        for name in master_weights(training.optimizer, training.named_shards)
        if isinstance(tensor := tensors[f"model.{name}"], DTensor)
    }
    set_master_weights(training.optimizer, training.named_shards, loaded)


def all_tensors(run: SavedSpec, training: LiveTraining) -> dict[str, Tensor]:
    """Weights, optimizer states and averages as parts of whole tensors, in the live storage."""
    settle(training.device)  # what offload is still sending to the host
    shards = {one.name: one for one in training.program.shards}
    tensors = weight_tensors(training)
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
        return adopted_tensors(training.optimizer, training.named_shards)
    return state_tensors(training.optimizer, training.named_shards, run.optim)


def without_strange_histories(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Of the histories of fp8 scales only those that a checkpoint has.

    It may be of a run with another recipe; a linear whose history is not there begins one.
    """
    saved = saved_shapes(folder)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("fp8.") or saved.get(name) == tuple(tensor.shape)
    }


class Checkpoints:
    """The checkpoints of one run; every method is called by all ranks."""

    def __init__(
        self,
        run: SavedSpec,
        root: Path,
        training: LiveTraining,
        batches: Resumable,
        user_state: UserState | None = None,
        fp8_fallback: Fp8Fallback | None = None,
    ) -> None:
        self.run, self.root, self.training, self.batches = run, root, training, batches
        self.user_state, self.fp8_fallback = user_state, fp8_fallback
        self.saved_step: int | None = None

    def save(self, progress: Progress) -> Path:
        """Save everything and drop what `keep_last` no longer wants."""
        with self.training.weights.at_hand():
            tensors = all_tensors(self.run, self.training)
            folder = save_checkpoint(
                self.root, step=progress.step, tensors=tensors, facts=self._facts(progress)
            )
        self.saved_step = progress.step
        if dist.get_rank() == 0:
            keep_last(self.root, self.run.checkpoint.keep_last)
        return folder

    def restore(self) -> dict[str, Any] | None:
        """Load the newest complete checkpoint of this run: its progress; None where there is none."""
        found = complete_checkpoints(self.root)
        if not found:
            return None
        manifest = read_manifest(found[-1])
        require_same_course(self.run, manifest["run"], found[-1])
        verify_files(found[-1], manifest)
        if self.user_state is not None:
            self.user_state.allocate()
        with self.training.weights.at_hand(changing=True):
            tensors = all_tensors(self.run, self.training)
            load_tensors(found[-1], without_strange_histories(tensors, found[-1]))
            take_masters(self.training, tensors)
            self.training.program.gather_parameters()
            if self.training.fp8_scales is not None:
                self.training.fp8_scales.set_scales()
        return self._restore_facts(manifest)

    def _facts(self, progress: Progress) -> dict[str, Any]:
        scale = self.training.loss_scale
        return {
            "name": self.run.name,
            "state": progress.to_facts(),
            "data": self.batches.state(),
            "user_state": self.user_state.state() if self.user_state else None,
            "loss_scale": {"scale": scale.scale, "num_clean_steps": scale.num_clean_steps} if scale else None,
            "fp8_fallen": self.fp8_fallback.fallen if self.fp8_fallback else [],
            "trajectory": self.run.trajectory_fingerprint(),
            "run": self.run.model_dump(mode="json"),
            "versions": {"meshwright": __version__, "torch": torch.__version__},
        }

    def _restore_facts(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        training, progress = self.training, manifest["state"]
        if self.run.optim is not None:
            set_num_updates(
                training.optimizer, training.named_shards, self.run.optim, num_updates=progress["step"]
            )
        self.batches.load_state(manifest["data"])
        if self.user_state is not None:
            self.user_state.load_state(manifest["user_state"])
        if training.loss_scale is not None:
            training.loss_scale.scale = manifest["loss_scale"]["scale"]
            training.loss_scale.num_clean_steps = manifest["loss_scale"]["num_clean_steps"]
        if self.fp8_fallback is not None and _recipe(manifest["run"]) == self.fp8_fallback.recipe:
            self.fp8_fallback.restore(manifest.get("fp8_fallen", []))  # another recipe gets another chance
        self.saved_step = progress["step"]
        return progress


def _recipe(saved: Mapping[str, Any]) -> str | None:
    return (saved["precision"].get("fp8") or {}).get("recipe")


def require_same_course(run: SavedSpec, saved: Mapping[str, Any], where: Path) -> None:
    """Refuse to go on where another run was, and say what differs; `saved` is its resolved spec.

    The saved spec is read anew, so that a field added since, at its default, is no difference.
    """
    if _course(saved, type(run)) == run.trajectory_fingerprint():
        return
    different = _differences(saved, run.model_dump(mode="json"))
    named = ", ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in different[:3])
    raise CheckpointError(
        f"this directory holds another run: {named or 'the specs differ'}",
        where=str(where),
        hint="train into another directory (--dir), or set checkpoint.start_from to take only its weights"
        if isinstance(run, RunSpec)
        else "name another directory, or take only its weights with meshwright.load_weights",
    )


def _course(saved: Mapping[str, Any], kind: type[SavedSpec]) -> str | None:
    try:
        return kind.model_validate(saved).trajectory_fingerprint()
    except ValueError:  # of a version whose fields are no longer known
        return None


_MAY_DIFFER = (
    *("name", "device", "compile", "parallel", "memory", "observe", "checkpoint"),
    *(
        "data.microbatch_sequences",
        "precision.weights",
        "precision.gradients",
        "optim.state",
        "precision.fp8",
    ),
)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in sorted(set(old) | set(new)):
        if f"{prefix}{key}" in _MAY_DIFFER:
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append((f"{prefix}{key}", a, b))
    return found
