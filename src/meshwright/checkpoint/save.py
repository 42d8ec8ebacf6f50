"""Save: every rank writes its shards into a hidden folder; the manifest is last, then one rename.

    checkpoints/step-00000120/
        shard-00000.safetensors ...   what one rank writes: each element of the state once, over all ranks
        index.json                    which box of which tensor is in which file
        manifest.json                 sizes and digests of the files, the training state, the resolved run

A reader ignores a folder without a manifest, so a kill at any time leaves the last complete checkpoint
in place. All files are JSON and safetensors: opening a checkpoint executes nothing.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.assign import BoxAssignment
from meshwright.checkpoint.digest import entry_of_bytes
from meshwright.checkpoint.index import INDEX, Box, IndexEntry, dump_index, shard_file_name
from meshwright.checkpoint.shard_file import DTYPE_NAMES, write_shard_file
from meshwright.errors import CheckpointError, MeshwrightError

FORMAT_VERSION, OLDEST_FORMAT_VERSION = 3, 2
"""What is written, and the oldest that is read. Version 1 kept its list of tensors as a pickle, which runs
code when it is opened; version 2 has one SHA-256 of each file rather than digests of its chunks."""
MANIFEST = "manifest.json"
PARTIAL, REPLACED = ".partial-", ".replaced-"
"""Beginnings of the names of folders that are being written, or that a new save replaces."""
Result = TypeVar("Result")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is published."""
    return root / f"step-{step:08d}"


def save_checkpoint(
    root: Path, *, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> Path:
    """Write and publish one checkpoint; all ranks call it. An error on one rank raises on all."""
    assignment = BoxAssignment()
    mine = assignment.local_tensors(tensors)
    return write_checkpoint(root, step=step, tensors=mine, index=assignment.index, facts=facts)


def save_in_groups(
    root: Path, *, step: int, groups: Iterable[dict[str, Tensor]], facts: Mapping[str, Any]
) -> Path:
    """Write and publish a checkpoint of full tensors from one process, with a shard file for each group.

    A group is freed before the next one is asked for.
    """
    target, partial = step_folder(root, step), root / f"{PARTIAL}{step:08d}"
    _prepare(root, partial)
    index: dict[str, IndexEntry] = {}
    files: dict[str, dict[str, Any]] = {}
    for number, tensors in enumerate(groups):
        name = shard_file_name(number)
        files[name] = write_shard_file(partial / name, tensors)
        for saved, tensor in tensors.items():
            box = Box(name, (0,) * tensor.ndim, tuple(tensor.shape))
            index[saved] = IndexEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), (box,))
            del tensor
        tensors.clear()
    manifest = {"version": FORMAT_VERSION, "step": step, "saved_at": time.time(), **facts, "files": files}
    _publish(partial, target, index, manifest)
    return target


def write_checkpoint(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    index: Mapping[str, IndexEntry],
    facts: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    place: "SavePlace | None" = None,
) -> Path:
    """Write the local tensors of every rank and publish them; all ranks call it. Communicates.

    An error on one rank raises on all. A thread beside the training passes a process group of its own.
    Without a `place`, `root` is the same folder for all ranks.
    """
    target, partial = step_folder(root, step), root / f"{PARTIAL}{step:08d}"
    publishes = dist.get_rank() == 0 if place is None else place.publishes
    header = {"version": FORMAT_VERSION, "step": step, "saved_at": time.time(), **facts}
    if place is not None:
        header = _from_first_rank(header, group)  # all places have the same manifest
    try:
        _or_raise_on_all(lambda: _prepare(root, partial), group, here=publishes)
        written = _or_raise_on_all(lambda: _write_shards(partial, tensors), group)
        files = {name: entry for part in written for name, entry in part.items()}
        if place is not None and place.copy_files is not None:
            copy_files = place.copy_files
            _or_raise_on_all(lambda: copy_files(partial, files, group), group)
        manifest = {**header, "files": files}
        _or_raise_on_all(lambda: _publish(partial, target, index, manifest), group, here=publishes)
    except CheckpointError:
        if publishes:  # on a full disk, half a checkpoint leaves no space for the rest of the run
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


@dataclass(frozen=True)
class SavePlace:
    """How a checkpoint is written into folders that not all ranks share."""

    publishes: bool
    """Whether this rank prepares and publishes the folder."""
    copy_files: Callable[[Path, Mapping[str, Any], dist.ProcessGroup | None], None] | None = None
    """Copies files of the folder elsewhere before it is published; all ranks call it."""


def _from_first_rank(value: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    found = [value]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


def on_all_ranks(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Call on every rank; an error of ours on one rank is raised on all. Communicates."""
    result, refusal = None, None
    try:
        result = action()
    except MeshwrightError as error:
        refusal = error
    refusals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal, group=group)
    for found in refusals:
        if found is not None:
            raise found
    return cast(Result, result)


def _or_raise_on_all(
    action: Callable[[], Any], group: dist.ProcessGroup | None, *, here: bool = True
) -> list[Any]:
    """Run on all ranks where `here` is true; a failure on one rank raises on all. Communicates."""
    result, failure = None, None
    try:
        if here:
            result = action()
    except Exception as error:  # whatever a file system raises must reach the other ranks
        failure = _failure_text(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure), group=group)
    failures = [text for _, text in outcomes if text]
    if failures:
        raise CheckpointError(
            failures[0].splitlines()[0], where="saving a checkpoint", hint="is the disk full or read-only?"
        )
    return [value for value, _ in outcomes if value is not None]


def _failure_text(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"rank {dist.get_rank()}: {type(error).__name__}: {reason}"


def _prepare(root: Path, partial: Path) -> None:
    root.mkdir(exist_ok=True)  # not its parents: a run directory that vanished is not made again
    if partial.exists():  # left by a save that did not finish
        shutil.rmtree(partial)
    partial.mkdir()


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Write this rank's file; a rank that has nothing to write has no file."""
    if not tensors:
        return {}
    name = shard_file_name(dist.get_rank())
    return {name: write_shard_file(folder / name, tensors)}


def _write_text(path: Path, text: str) -> dict[str, Any]:
    """Write and flush to the disk; returns the file's entry in the manifest."""
    content = text.encode()
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return entry_of_bytes(content)


def _publish(partial: Path, target: Path, index: Mapping[str, IndexEntry], manifest: dict[str, Any]) -> None:
    manifest["files"][INDEX] = _write_text(partial / INDEX, dump_index(index))
    _write_text(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    publish_folder(partial, target)


def publish_folder(partial: Path, target: Path) -> None:
    """Give a complete folder its name, and flush that to the disk. A folder of that name is replaced."""
    if target.exists():  # the same step saved again after a resume: the new one replaces it
        replaced = target.with_name(f"{REPLACED}{target.name}")
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
