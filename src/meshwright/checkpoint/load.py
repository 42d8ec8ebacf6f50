"""Load: find the newest complete checkpoint, verify it, read it into the shards of this mesh."""

import hashlib
import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshwright import __version__
from meshwright.checkpoint.save import FORMAT_VERSION, MANIFEST
from meshwright.errors import CheckpointError


def complete_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: files, training state, resolved run. Refuses other format versions."""
    path = folder / MANIFEST
    hint = "name a folder step-<n> of a run's checkpoints"
    if not path.is_file():
        raise CheckpointError("there is no complete checkpoint here", where=str(folder), hint=hint)
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"the manifest is damaged: {error}", where=str(path), hint="use an older checkpoint"
        ) from None
    if manifest.get("version") != FORMAT_VERSION:
        raise _other_version(manifest, path)
    return manifest


def _other_version(manifest: Mapping[str, Any], path: Path) -> CheckpointError:
    found = manifest.get("version")
    is_older = isinstance(found, int) and found < FORMAT_VERSION
    writer = (manifest.get("versions") or {}).get("meshwright", "(unknown version)")
    older = "convert it with that version (`meshwright convert`) to a Hugging Face folder, which "
    return CheckpointError(
        f"this checkpoint has format version {found}, written by meshwright {writer}; "
        f"meshwright {__version__} reads format version {FORMAT_VERSION}",
        where=str(path),
        hint=older + "checkpoint.start_from reads here, or finish the run with that version"
        if is_older
        else "update meshwright",
    )


def verify_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare sizes and hashes with the manifest; ranks, where there are several, share the files."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = sorted(manifest["files"])[rank::num_ranks]
    damaged = [name for name in names if not _is_intact(folder / name, manifest["files"][name])]
    found: list[Any] = [damaged]
    if num_ranks > 1:
        found = [None] * num_ranks
        dist.all_gather_object(found, damaged)
    all_damaged = [name for part in found for name in part]
    if all_damaged:
        raise CheckpointError(
            f"{len(all_damaged)} file(s) differ from the manifest, first {all_damaged[0]}",
            where=str(folder),
            hint="delete this folder to resume from the one before",
        )


def _is_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == entry["sha256"]


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The full shape of every tensor in a checkpoint, by its name there; no tensor is read."""
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the list of tensors cannot be read: {error}", where=str(folder), hint="use an older checkpoint"
        ) from None
    return {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read into the given tensors, in place; each rank reads only what its shards need.

    Also works in one process without process groups, such as one that samples.
    """
    saved = saved_shapes(folder)
    missing = sorted(set(tensors) - set(saved))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensor(s) are not in the checkpoint, first {missing[0]}",
            where=str(folder),
            hint="the checkpoint is of another model or optimizer",
        )
    for name, tensor in tensors.items():
        if saved[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {saved[name]} there and {tuple(tensor.shape)} in this run",
                where=str(folder),
                hint="the checkpoint is of another model",
            )
    with warnings.catch_warnings():
        # torch warns of a single process even with no_dist=True.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(dict(tensors), checkpoint_id=folder, no_dist=not dist.is_initialized())
