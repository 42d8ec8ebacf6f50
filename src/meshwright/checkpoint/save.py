"""Save: every rank writes its shards into a hidden folder; the manifest is last, then one rename.

    checkpoints/step-000120/
        __0_0.distcp ...   shards, by torch's distributed checkpoint
        .metadata          which tensor is in which file
        manifest.json      sizes and hashes of the files, the training state, the resolved run

A reader ignores a folder without a manifest, so a kill at any time leaves the last complete checkpoint
in place.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.errors import CheckpointError

FORMAT_VERSION = 2
"""Version 1 had other names in its manifest; see `load.read_manifest`."""
MANIFEST = "manifest.json"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is published."""
    return root / f"step-{step:08d}"


def save_checkpoint(
    root: Path, *, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> Path:
    """Write and publish one checkpoint; all ranks call it. An error on one rank raises on all."""
    target, partial = step_folder(root, step), root / f".partial-{step:08d}"
    try:
        _on_all_ranks(lambda: _prepare(root, partial), only_first=True)
        _on_all_ranks(lambda: dcp.save(dict(tensors), checkpoint_id=partial))
        files = _on_all_ranks(lambda: _hash_files(partial, _assigned_files(partial)))
        merged = {name: entry for part in files for name, entry in part.items()}
        header = {"version": FORMAT_VERSION, "step": step, "saved_at": time.time(), "files": merged}
        _on_all_ranks(lambda: _publish(partial, target, {**header, **facts}), only_first=True)
    except CheckpointError:
        if dist.get_rank() == 0:  # on a full disk, half a checkpoint leaves no space for the rest of the run
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _on_all_ranks(action: Callable[[], Any], *, only_first: bool = False) -> list[Any]:
    """Run on all ranks (or on rank 0 alone); a failure on one rank raises on all. Communicates."""
    result, failure = None, None
    try:
        if not only_first or dist.get_rank() == 0:
            result = action()
    # Whatever a file system or planner raises must reach the other ranks; torch's own is no Exception.
    except (Exception, CheckpointException) as error:
        failure = _failure_text(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    failures = [text for _, text in outcomes if text]
    if failures:
        raise CheckpointError(
            failures[0].splitlines()[0], where="saving a checkpoint", hint="is the disk full or read-only?"
        )
    return [value for value, _ in outcomes if value is not None]


def _failure_text(error: BaseException) -> str:
    """One line with rank and reason; of the failures that torch has gathered, the first one."""
    rank = dist.get_rank()
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    if "inline_container" in str(error):  # torch's writer gives positions instead of reasons
        return f"rank {rank}: a file could not be written completely"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"rank {rank}: {type(error).__name__}: {reason}"


def _prepare(root: Path, partial: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if partial.exists():  # left by a save that did not finish
        shutil.rmtree(partial)
    partial.mkdir()


def _assigned_files(folder: Path) -> list[Path]:
    """The files that this rank hashes: every rank takes its part."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return files[dist.get_rank() :: dist.get_world_size()]


def _hash_files(folder: Path, files: list[Path]) -> dict[str, dict[str, Any]]:
    entries = {}
    for path in files:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": digest}
    return entries


def _publish(partial: Path, target: Path, manifest: dict[str, Any]) -> None:
    with (partial / MANIFEST).open("w") as stream:
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    if target.exists():  # the same step saved again after a resume: the new one replaces it
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
