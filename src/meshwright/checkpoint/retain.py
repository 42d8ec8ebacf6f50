"""Deletes old checkpoints."""

import shutil
from pathlib import Path

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.save import MANIFEST


def keep_last(root: Path, count: int) -> list[Path]:
    """Delete all complete checkpoints but the newest `count`; returns what was deleted. One rank calls it."""
    old = complete_checkpoints(root)[:-count]
    for folder in old:
        (folder / MANIFEST).unlink()  # first: a half-deleted folder must not look complete
        shutil.rmtree(folder)
    return old
