"""Whether a checkpoint of this run can be resumed from, as far as its manifest says."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.load import read_manifest, require_sizes
from meshwright.checkpoint.save import MANIFEST
from meshwright.errors import CheckpointError


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Inside, values of a manifest that are missing or of another type are an error of that file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the manifest is damaged: {type(error).__name__}: {error}",
            where=str(path),
            hint="use an older checkpoint",
        ) from None


def read_usable(folder: Path, *, has_all_files: bool) -> dict[str, Any]:
    """The manifest of a checkpoint whose index and training state can be used; nothing is loaded.

    The folder of a node has only the files of its ranks.
    """
    manifest = read_manifest(folder)
    if has_all_files:
        require_sizes(folder, manifest)
    read_index(folder)
    with damage_reported(folder / MANIFEST):
        require_progress(manifest)
        _ = manifest["run"], manifest["data"]["position"]
    return manifest


def require_progress(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in a manifest; ValueError where it is not that of its step."""
    progress = manifest["state"]
    numbers = all(value is None or type(value) in (int, float) for value in progress.values())
    if not numbers or progress["step"] != manifest["step"]:
        raise ValueError(f"its progress is {progress!r}")
    return progress
