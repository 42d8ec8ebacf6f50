"""Deletes old checkpoints, and what an interrupted save left behind."""

import shutil
from pathlib import Path

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.save import MANIFEST, PARTIAL, REPLACED


def keep_last(root: Path, count: int) -> list[Path]:
    """Delete all complete checkpoints but the newest `count`; returns what was deleted. One rank calls it."""
    old = complete_checkpoints(root)[:-count]
    for folder in old:
        (folder / MANIFEST).unlink()  # first: a half-deleted folder must not look complete
        shutil.rmtree(folder)
    return old


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
