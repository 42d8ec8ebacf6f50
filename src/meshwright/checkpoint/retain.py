"""Which checkpoints are kept, the deletion of the others, and of what an interrupted save left behind."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.load import complete_checkpoints, read_manifest
from meshwright.checkpoint.save import MANIFEST, PARTIAL, REPLACED
from meshwright.errors import CheckpointError
from meshwright.spec import CheckpointSpec


def delete_old(
    root: Path, spec: CheckpointSpec, *, damaged: Iterable[Path] = (), needed: Iterable[Path] = ()
) -> list[Path]:
    """Delete the checkpoints that `spec` does not keep; returns them. One rank calls it.

    Damaged ones count for nothing: they do not push an intact one out, and are deleted. `needed` ones stay:
    they are being copied elsewhere.
    """
    bad = set(damaged)
    found = complete_checkpoints(root)
    intact = [folder for folder in found if folder not in bad]
    kept = kept_checkpoints(intact, spec) | set(needed)
    deleted = [folder for folder in found if folder not in kept]
    for folder in deleted:
        delete_checkpoint(folder)
    return deleted


def delete_checkpoint(folder: Path) -> None:
    """Delete one published checkpoint."""
    (folder / MANIFEST).unlink()  # first: a half-deleted folder must not look complete
    shutil.rmtree(folder)


def kept_checkpoints(folders: Sequence[Path], spec: CheckpointSpec) -> set[Path]:
    """The checkpoints that are kept, of those given from oldest to newest."""
    kept = set(folders[-spec.keep_last :])
    if spec.keep_every_steps is not None:
        kept |= {folder for folder in folders if _step(folder) % spec.keep_every_steps == 0}
    if spec.keep_every_epochs is not None or spec.keep_best is not None:
        facts = {folder: _facts(folder) for folder in folders}
        kept |= _first_of_epochs(facts, spec.keep_every_epochs) | _best(facts, spec.keep_best)
    return kept


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _facts(folder: Path) -> dict[str, Any]:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return {}


def _first_of_epochs(facts: dict[Path, dict[str, Any]], every: int | None) -> set[Path]:
    """The first checkpoint of every `every` complete epochs."""
    if every is None:
        return set()
    first: dict[int, Path] = {}
    for folder, manifest in facts.items():
        epochs = manifest.get("num_epochs")
        if isinstance(epochs, int) and epochs >= every:
            first.setdefault(epochs // every, folder)
    return set(first.values())


def _best(facts: dict[Path, dict[str, Any]], count: int | None) -> set[Path]:
    """The checkpoints with the lowest evaluation loss; of equal ones the newer."""
    losses = [(_eval_loss(manifest), -_step(folder), folder) for folder, manifest in facts.items()]
    return {folder for loss, _, folder in sorted(losses)[: count or 0] if loss < float("inf")}


def _eval_loss(manifest: dict[str, Any]) -> float:
    """The evaluation loss of a checkpoint; infinite where none was measured at its step."""
    state = manifest.get("state")
    if not isinstance(state, dict) or state.get("last_eval_step") != manifest.get("step"):
        return float("inf")
    loss = state.get("last_eval_loss")
    return float(loss) if isinstance(loss, int | float) and loss == loss else float("inf")


def remove_leftovers(root: Path) -> None:
    """Delete what a killed save or deletion left; the caller holds the lock of the run directory.

    A save that replaces a checkpoint sets the old one aside first: where the new one did not appear, the old
    one gets its name back.
    """
    for replaced in root.glob(f"{REPLACED}*"):
        target = root / replaced.name.removeprefix(REPLACED)
        if not target.exists() and (replaced / MANIFEST).is_file():
            replaced.rename(target)
    half_deleted = [folder for folder in root.glob("step-*") if not (folder / MANIFEST).is_file()]
    for folder in (*root.glob(f"{PARTIAL}*"), *root.glob(f"{REPLACED}*"), *half_deleted):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
