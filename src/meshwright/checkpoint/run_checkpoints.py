"""The checkpoints of a run: which tensors and values are saved, and how they are restored."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import __version__
from meshwright.checkpoint.adapters import adapter_of, base_record, require_same_base, saved_shards
from meshwright.checkpoint.digest import DamagedCheckpoint
from meshwright.checkpoint.live import DataPosition, Fp8Fallback, LiveTraining, Progress, UserState
from meshwright.checkpoint.load import (
    complete_checkpoints,
    load_tensors,
    needed_files,
    saved_shapes,
)
from meshwright.checkpoint.local_tier import LocalTier
from meshwright.checkpoint.save import MANIFEST, on_all_ranks
from meshwright.checkpoint.saver import SaveOutcome, Saver
from meshwright.checkpoint.transfer import complete_on_remote, download_checkpoint
from meshwright.checkpoint.upload import Uploader, UploadOutcome
from meshwright.checkpoint.usable import damage_reported, read_usable, require_progress
from meshwright.errors import CheckpointError, DataError, MeshwrightError
from meshwright.memory.offload.host import synchronize
from meshwright.optim.build import (
    master_weights,
    set_master_weights,
    set_num_updates,
    state_dims,
    state_tensors,
)
from meshwright.optim.user_optimizer import user_state_tensors
from meshwright.spec import ResilienceSpec, RunSpec
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
    """The checkpoints of one run; every method is called by all ranks. Use as a context to save."""

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
        timeouts = ResilienceSpec() if isinstance(run, LoopSpec) else run.resilience
        self._saver = Saver(root, run.checkpoint, training.device, timeout_seconds=timeouts.longest_seconds)
        self.damaged: dict[Path, CheckpointError] = {}
        """Checkpoints that `restore` skipped, and why."""
        self.changes: list[Change] = []
        """Settings that differ from those of the restored checkpoint."""
        self.restarts_data = False
        """Whether the data begins anew after `restore`, because the run has other samples."""
        self._base = on_all_ranks(lambda: base_record(run)) if isinstance(run, RunSpec) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save that is being written, unless this rank fails for an unknown reason."""
        if error is None or isinstance(error, MeshwrightError):
            self.wait()
        if error is None:  # after an error other ranks may be in any collective
            self._saver.close()

    @property
    def saved_step(self) -> int | None:
        """The last step that was published or restored."""
        return self._saver.saved_step

    def is_due(self, step: int) -> bool:
        """Whether a save is due after this step: by its interval, or because the last one failed."""
        return self._saver.is_due(step)

    def start_save(self, progress: Progress) -> list[SaveOutcome]:
        """Copy everything to host memory, write it in the background; returns the saves that have ended."""
        with self.training.weights.all_on_device():
            tensors = all_tensors(self.run, self.training)
            return self._saver.start(progress.step, tensors, self._facts(progress))

    def save(self, progress: Progress) -> list[SaveOutcome]:
        """Save everything and wait for the disk; returns the saves that have ended, this one last."""
        with self.training.weights.all_on_device():
            tensors = all_tensors(self.run, self.training)
            return self._saver.save(progress.step, tensors, self._facts(progress))

    def poll(self) -> list[SaveOutcome]:
        """The save that has ended on all ranks since the last call, if any; does not wait."""
        return self._saver.poll()

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save that is being written, if any; returns its outcome."""
        return self._saver.wait()

    def poll_upload(self) -> UploadOutcome | None:
        """The copy to `checkpoint.upload` that has ended on all ranks, if any; does not wait."""
        return self._saver.poll_upload()

    def finish_upload(self) -> UploadOutcome | None:
        """Wait until the last checkpoint is copied to `checkpoint.upload`; None where nothing was to do."""
        return self._saver.finish_upload()

    def upload_missing(self, step: int) -> UploadOutcome | None:
        """Copy the last checkpoint of a finished run to `checkpoint.upload`, unless it is there; all ranks
        call it. None where nothing was to do."""
        uploader, folder = self._saver.uploader, self.root / f"step-{step:08d}"
        if uploader is None or folder.name in self._names_on_remote(uploader, has_local=True):
            return None
        try:
            return uploader.finish(folder)
        finally:
            uploader.close()

    def restore(self) -> dict[str, Any] | None:
        """Load the newest intact checkpoint of this run; returns its progress, None where there is none.

        Of the same step, that of the nodes (`checkpoint.local`) comes first, then that of the run directory,
        then the copy of `checkpoint.upload`, which is fetched. A damaged one is skipped and named on stderr.
        Where all are damaged, the newest one's error is raised.
        """
        for folder, fetch in self._candidates():
            is_local = folder.parent != self.root
            try:
                fetch()
                manifest = on_all_ranks(
                    lambda folder=folder, is_local=is_local: read_usable(folder, has_all_files=not is_local)
                )
            except CheckpointError as error:
                self._skip(folder, error)
                continue
            with damage_reported(folder / MANIFEST):
                self.changes = allowed_changes(self.run, manifest["run"], folder)
            try:
                progress = self._load(folder, manifest)
            except DamagedCheckpoint as error:  # found while it was read: the next one overwrites it
                self._skip(folder, error)
                continue
            self._saver.damaged = [one for one in self._saver.damaged if one != folder]
            # The step of a local checkpoint is not in the run directory: it still has to be saved there.
            self._saver.saved_step = None if is_local else progress["step"]
            return progress
        if self.damaged:
            raise next(iter(self.damaged.values()))
        return None

    def _candidates(self) -> Iterator[tuple[Path, Callable[[], object]]]:
        """Checkpoints from newest to oldest, and what brings each of them into the run directory."""
        local = {folder.name for folder in complete_checkpoints(self.root)}
        uploader, tier = self._saver.uploader, self._saver.local
        on_nodes = set(tier.complete()) if tier is not None else set[str]()
        remote = set(self._names_on_remote(uploader, has_local=bool(local or on_nodes)))
        for name in sorted(local | remote | on_nodes, reverse=True):
            folder = self.root / name
            if tier is not None and name in on_nodes:
                yield tier.root / name, partial(self._fetch_from_nodes, name, tier)
            if name in local:
                yield folder, lambda: None
            if name in remote and uploader is not None:
                yield folder, partial(download_checkpoint, name, uploader.remote, self.root)

    def _fetch_from_nodes(self, name: str, tier: LocalTier) -> None:
        """Copy the files that this rank reads, and its node does not have, from the nodes that have them."""
        folder = tier.fetch_index(name)
        if self.user_state is not None:
            self.user_state.allocate()
        with self.training.weights.all_on_device():
            needed = needed_files(folder, all_tensors(self.run, self.training))
        tier.fetch_files(name, needed)

    def _names_on_remote(self, uploader: Uploader | None, *, has_local: bool) -> list[str]:
        """The copies that there are; where the store does not answer, none if the run directory has some."""
        if uploader is None:
            return []
        try:
            return complete_on_remote(uploader.remote)
        except CheckpointError as error:
            if not has_local:
                raise
            if dist.get_rank() == 0:
                print(f"note: {uploader.spec.destination} is not read: {error.fact}", file=sys.stderr)
            return []

    def _skip(self, folder: Path, error: CheckpointError) -> None:
        self.damaged[folder] = error
        if folder.parent == self.root:
            self._saver.damaged.append(folder)
        if dist.get_rank() == 0:
            print(f"note: {folder} is damaged and skipped: {error.fact}", file=sys.stderr)

    def _load(self, folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
        require_same_base(manifest.get("base"), self._base, folder)
        if self.user_state is not None:
            self.user_state.allocate()
        damage: DamagedCheckpoint | None = None
        with self.training.weights.all_on_device(changing=True):  # left in order, also after damage
            try:
                self._load_tensors(folder, manifest)
            except DamagedCheckpoint as error:
                damage = error
        if damage is not None:
            raise damage
        with damage_reported(folder / MANIFEST):
            return self._restore_facts(manifest)

    def _load_tensors(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Read all tensors, verified on the way; DamagedCheckpoint on all ranks where one finds damage."""
        tensors = all_tensors(self.run, self.training)
        saved = set(saved_shapes(folder))
        wanted = without_new_averages(without_unsaved_fp8_histories(tensors, folder), saved)
        on_all_ranks(lambda: load_tensors(folder, wanted, files=manifest["files"]))
        set_loaded_masters(self.training, tensors)
        if self.training.ema is not None and not any(name.startswith("ema.") for name in saved):
            self.training.ema.restart()
        self.training.program.gather_parameters()
        if self.training.fp8_scales is not None:
            self.training.fp8_scales.set_scales()

    def _facts(self, progress: Progress) -> dict[str, Any]:
        scale = self.training.loss_scale
        return {
            "name": self.run.name,
            "state": progress.to_facts(),
            "data": self.batches.state(),
            "num_epochs": self.batches.num_epochs,
            "user_state": self.user_state.state() if self.user_state else None,
            "loss_scale": scale.state() if scale else None,
            "fp8_fallback_layers": self.fp8_fallback.fallback_layers if self.fp8_fallback else [],
            "base": self._base,
            "trajectory": self.run.trajectory_fingerprint(),
            "run": self.run.model_dump(mode="json"),
            "versions": {"meshwright": __version__, "torch": torch.__version__},
        }

    def _restore_facts(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        training, progress = self.training, require_progress(manifest)
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
        hint=_other_directory(run),
    )


def _other_directory(run: SavedSpec) -> str:
    """How to take what was trained into a directory of its own."""
    if not isinstance(run, RunSpec):
        return "set it back, or name another directory and take the weights with meshwright.load_weights"
    if run.adapter is not None:
        return "set it back, or train new adapters in another directory (--dir)"
    return (
        "set it back, or train into another directory (--dir) with checkpoint.start_from, which takes the "
        "weights alone"
    )
