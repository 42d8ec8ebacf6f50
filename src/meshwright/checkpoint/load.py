"""Load: find the newest complete checkpoint, verify it, read it into the shards of this mesh."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import __version__
from meshwright.checkpoint.assign import local_box
from meshwright.checkpoint.chunk_read import is_intact
from meshwright.checkpoint.digest import DamagedCheckpoint, is_entry, require_size
from meshwright.checkpoint.index import INDEX, IndexEntry, read_index
from meshwright.checkpoint.json_file import read_json
from meshwright.checkpoint.save import FORMAT_VERSION, MANIFEST, OLDEST_FORMAT_VERSION
from meshwright.checkpoint.shard_read import BoxPart, ShardFiles
from meshwright.errors import CheckpointError
from meshwright.memory.offload.budget import ranks_on_this_host

_OLDER = "use an older checkpoint"
_STEP_NAME = re.compile(r"step-(\d+)")
_MAX_TIMES_READ = 1.25
"""Times that a host may read a byte before its ranks go through the page cache."""
_MAX_MANIFEST_BYTES = 2**28


def complete_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: files, training state, resolved run. Refuses other format versions."""
    path = folder / MANIFEST
    hint = "name a folder step-<n> of a run's checkpoints"
    if not path.is_file():
        raise CheckpointError("there is no complete checkpoint here", where=str(folder), hint=hint)
    manifest = read_json(path, max_bytes=_MAX_MANIFEST_BYTES)
    version = manifest.get("version")
    if type(version) is not int or not OLDEST_FORMAT_VERSION <= version <= FORMAT_VERSION:
        raise _other_version(manifest, path)
    _require_form(manifest, path)
    return manifest


def _require_form(manifest: Mapping[str, Any], path: Path) -> None:
    """Refuse a manifest whose files or step are not what `save_checkpoint` writes."""
    files, step = manifest.get("files"), manifest.get("step")
    fault = None
    if type(step) is not int or step < 0:
        fault = f"its step is {step!r}"
    elif (named := _STEP_NAME.fullmatch(path.parent.name)) and int(named[1]) != step:
        fault = f"it is of step {step}, and its folder is {path.parent.name}"
    elif not isinstance(files, dict) or INDEX not in files or not all(map(_is_file_entry, files.items())):
        fault = "its list of files is not one"
    if fault:
        raise CheckpointError(f"the manifest is damaged: {fault}", where=str(path), hint=_OLDER)


def _is_file_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return Path(name).name == name and is_entry(entry)


def _other_version(manifest: Mapping[str, Any], path: Path) -> CheckpointError:
    found = manifest.get("version")
    is_older = isinstance(found, int) and found < OLDEST_FORMAT_VERSION
    versions = manifest.get("versions")
    writer = versions.get("meshwright") if isinstance(versions, dict) else "(unknown version)"
    older = "convert it with that version (`meshwright convert`) to a Hugging Face folder, which "
    return CheckpointError(
        f"this checkpoint has format version {found}, written by meshwright {writer}; "
        f"meshwright {__version__} reads format versions {OLDEST_FORMAT_VERSION} to {FORMAT_VERSION}",
        where=str(path),
        hint=older + "checkpoint.start_from reads here, or finish the run with that version"
        if is_older
        else "update meshwright",
    )


def verify_files(folder: Path, manifest: Mapping[str, Any], *, is_shared: bool = True) -> None:
    """Compare sizes and hashes with the manifest. Where there are several ranks, each takes a share of the
    files, and all ranks call it; without `is_shared` this process verifies all of them by itself."""
    has_ranks = is_shared and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
    names = sorted(manifest["files"])[rank::num_ranks]
    damaged = [name for name in names if not is_intact(folder / name, manifest["files"][name])]
    found: list[Any] = [damaged]
    if num_ranks > 1:
        found = [None] * num_ranks
        dist.all_gather_object(found, damaged)
    all_damaged = [name for part in found for name in part]
    if all_damaged:
        raise DamagedCheckpoint(
            f"{len(all_damaged)} file(s) differ from the manifest, first {all_damaged[0]}",
            where=str(folder),
            hint="use an older checkpoint: this one is damaged",
        )


def require_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose files are missing or of another size; reads none of them but the index."""
    for name, entry in manifest["files"].items():
        require_size(folder / name, entry)
    if not is_intact(folder / INDEX, manifest["files"][INDEX]):
        raise DamagedCheckpoint(f"{INDEX} differs from the manifest", where=str(folder), hint=_OLDER)


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The full shape of every tensor in a checkpoint, by its name there; no tensor is read."""
    return {name: entry.shape for name, entry in read_index(folder).items()}


def needed_files(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """The shard files that `load_tensors` reads on this rank."""
    index = read_index(folder)
    found = (_parts(name, tensor, index[name]) for name, tensor in tensors.items() if name in index)
    return {part.file for parts in found for part in parts}


def load_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, files: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Read into the given tensors, in place; each rank reads only what its shards need.

    With the files of its manifest, all that is read is verified on the way, in one pass. Also works in one
    process without process groups, such as one that samples.
    """
    index = read_index(folder)
    _require_tensors(index, tensors, folder)
    parts = [part for name, tensor in tensors.items() for part in _parts(name, tensor, index[name])]
    is_direct = files is not None and _is_read_once(parts, files)
    with ShardFiles(folder, files, is_direct=is_direct) as shard_files, torch.no_grad():
        shard_files.read(parts)


def _is_read_once(parts: Sequence[BoxPart], files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the ranks of this host read different bytes. Otherwise they share them in the page cache."""
    wanted = sum(part.target.nbytes for part in parts) * ranks_on_this_host()
    return wanted <= _MAX_TIMES_READ * sum(entry["bytes"] for entry in files.values())


def _require_tensors(index: Mapping[str, IndexEntry], tensors: Mapping[str, Tensor], folder: Path) -> None:
    missing = sorted(set(tensors) - set(index))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensor(s) are not in the checkpoint, first {missing[0]}",
            where=str(folder),
            hint="the checkpoint is of another model or optimizer",
        )
    for name, tensor in tensors.items():
        if index[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {index[name].shape} there and {tuple(tensor.shape)} in this run",
                where=str(folder),
                hint="the checkpoint is of another model",
            )


@torch.no_grad()
def _parts(name: str, tensor: Tensor, entry: IndexEntry) -> Iterator[BoxPart]:
    """The parts of saved boxes that this rank's box of a tensor consists of."""
    local, wanted = local_box(tensor)
    if not local.numel():
        return
    for box in entry.boxes:
        overlap = box.overlap(wanted)
        if overlap is not None:
            source, target = overlap
            yield BoxPart(box.file, name, source, local[target] if target else local)
