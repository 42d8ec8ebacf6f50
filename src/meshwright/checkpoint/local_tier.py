"""Checkpoints on the nodes themselves (`checkpoint.local`): in host memory or on a local disk, for restarts.

    <directory>/meshwright-<id>/step-00000120/
        shard-00000.safetensors ...   of the ranks of this node, and of the node before it (`neighbour_copy`)
        index.json, manifest.json     the same on all nodes: they name the files of all nodes

A step is complete where the nodes of this start have all files of one manifest among them. `local.json` in
the run's checkpoints has the id and the newest step. It ties the folders to the run: those of a run directory
that was deleted are never used.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.digest import digest_of
from meshwright.checkpoint.file_exchange import FileCopy, exchange_files
from meshwright.checkpoint.index import INDEX, IndexEntry, shard_file_name
from meshwright.checkpoint.load import complete_checkpoints, read_manifest
from meshwright.checkpoint.local_marker import MARKER, marker_id, write_marker
from meshwright.checkpoint.nodes import find_nodes
from meshwright.checkpoint.retain import delete_checkpoint
from meshwright.checkpoint.save import (
    MANIFEST,
    PARTIAL,
    SavePlace,
    on_all_ranks,
    publish_folder,
    write_checkpoint,
)
from meshwright.checkpoint.snapshot import snapshot_bytes
from meshwright.errors import CheckpointError
from meshwright.memory.offload.budget import host_share
from meshwright.spec.checkpoint import LocalSpec
from meshwright.units import show_bytes

_WHERE = "checkpoint.local"


class LocalTier:
    """The local checkpoints of one run; every method is called by all ranks. All methods communicate."""

    def __init__(self, spec: LocalSpec, run_root: Path) -> None:
        self._spec, self._run_root = spec, run_root
        directory = Path(os.path.expandvars(spec.node_directory)).expanduser()
        on_all_ranks(lambda: _require_folder(directory))
        self._nodes = find_nodes(str(directory.resolve()))
        if spec.neighbour_copy and len(self._nodes.ranks) == 1:
            fact = "neighbour_copy=true with one node: there is no neighbour that could hold a copy"
            raise CheckpointError(fact, where=f"{_WHERE}.neighbour_copy", hint="set it to false")
        found = [marker_id(run_root) or uuid.uuid4().hex if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(found, src=0)
        self._id = found[0]
        self.root = directory / f"meshwright-{self._id}"
        """The folder of this rank's node."""
        self._held: dict[str, list[set[str]]] = {}
        """By step name of a complete checkpoint: the files that each node has."""
        self._with_manifest: dict[str, list[int]] = {}
        """By step name of a complete checkpoint: the nodes that have its manifest."""

    def write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, IndexEntry],
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> Path:
        """Write and publish a checkpoint on the nodes; the one before is deleted then."""
        on_all_ranks(lambda: self._prepare(snapshot_bytes(tensors)), group)
        folder = write_checkpoint(
            self.root,
            step=step,
            tensors=tensors,
            index=index,
            facts=facts,
            group=group,
            place=SavePlace(self._nodes.is_leader, self._replicate if self._spec.neighbour_copy else None),
        )
        if self._nodes.is_leader:
            for older in complete_checkpoints(self.root):
                if older != folder:
                    with suppress(OSError):  # what is not deleted now is deleted later
                        delete_checkpoint(older)
        if dist.get_rank() == 0:
            write_marker(self._run_root, {"id": self._id, "step": step})
        return folder

    def complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self._found() if self._nodes.is_leader else {})
        by_node = [held[self._nodes.leader(node)] for node in range(len(self._nodes.ranks))]
        self._held, self._with_manifest = {}, {}
        saves = {(name, digest) for found in by_node for name, (digest, _, _) in found.items()}
        for name, digest in sorted(saves):
            having = [node for node, found in enumerate(by_node) if found.get(name, ("",))[0] == digest]
            files = [by_node[node][name][2] if node in having else set() for node in range(len(by_node))]
            if by_node[having[0]][name][1] <= set().union(*files):
                self._held[name], self._with_manifest[name] = files, having
        return sorted(self._held)

    def fetch_index(self, name: str) -> Path:
        """Give manifest and index of a complete checkpoint to the nodes without them; returns the folder."""
        having = self._with_manifest[name]
        source = self._nodes.leader(having[0])
        texts: list[Any] = [{}]
        if dist.get_rank() == source:
            with suppress(OSError):
                texts = [{file: (self.root / name / file).read_bytes() for file in (INDEX, MANIFEST)}]
        dist.broadcast_object_list(texts, src=source)
        if not texts[0]:
            raise CheckpointError(f"{name} cannot be read on node {having[0]}", where=_WHERE)
        lacks = self._nodes.is_leader and self._nodes.node not in having
        on_all_ranks(lambda: _as_our_error(lambda: self._write_index(name, texts[0])) if lacks else None)
        return self.root / name

    def _write_index(self, name: str, texts: Mapping[str, bytes]) -> None:
        """Publish a folder with manifest and index, without shard files."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        partial = self.root / f"{PARTIAL}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for file, content in texts.items():
            (partial / file).write_bytes(content)
        publish_folder(partial, self.root / name)

    def fetch_files(self, name: str, needed: set[str]) -> None:
        """Copy the files that this rank needs, and its node does not have, from a node that has them."""
        held = self._held[name]
        lacking: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lacking, sorted(needed - held[self._nodes.node]))
        sizes = {file: entry["bytes"] for file, entry in read_manifest(self.root / name)["files"].items()}
        copies = []
        for node, ranks in enumerate(self._nodes.ranks):
            for file in sorted({file for rank in ranks for file in lacking[rank]}):
                source = next(other for other, files in enumerate(held) if file in files)
                ends = self._nodes.leader(source), self._nodes.leader(node)
                copies.append(FileCopy(file, sizes[file], *ends))
        on_all_ranks(lambda: _as_our_error(lambda: exchange_files(copies, self.root / name)))

    def remove(self) -> None:
        """Delete everything on all nodes: the run directory has the last step."""
        if self._nodes.is_leader:
            shutil.rmtree(self.root, ignore_errors=True)
        if dist.get_rank() == 0:
            (self._run_root / MARKER).unlink(missing_ok=True)

    def _prepare(self, num_bytes: int) -> None:
        """Make the folder; refuse where host memory would run out, because Linux then kills a process."""
        copies = 2 if self._spec.neighbour_copy else 1
        if self._spec.is_in_memory and copies * num_bytes > host_share():
            raise CheckpointError(
                f"a local checkpoint needs {show_bytes(copies * num_bytes)} of host memory on this rank, and "
                f"its share of what is free is {show_bytes(host_share())}",
                where=_WHERE,
                hint="name a local disk as checkpoint.local.node_directory",
            )
        _as_our_error(lambda: self.root.mkdir(mode=0o700, exist_ok=True))

    def _replicate(
        self, folder: Path, files: Mapping[str, Mapping[str, Any]], group: dist.ProcessGroup | None
    ) -> None:
        """Copy every rank's file to the next node."""
        ranks = range(dist.get_world_size())
        names = {rank: shard_file_name(rank) for rank in ranks if shard_file_name(rank) in files}
        copies = [
            FileCopy(file, files[file]["bytes"], rank, self._nodes.copy_holder(rank))
            for rank, file in names.items()
        ]
        exchange_files(copies, folder, group)

    def _found(self) -> dict[str, tuple[str, set[str], set[str]]]:
        """By step name: digest of the manifest, the files of the checkpoint, and those that this node has."""
        found = {}
        for folder in complete_checkpoints(self.root):
            try:
                files = read_manifest(folder)["files"]
                digest = digest_of((folder / MANIFEST).read_bytes())
            except (CheckpointError, OSError):
                continue
            here = {file for file in files if _has_size(folder / file, files[file]["bytes"])}
            found[folder.name] = digest, set(files), here
        return found


def _require_folder(directory: Path) -> None:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        fact = f"{directory} is no folder that can be written to on this node"
        raise CheckpointError(
            fact, where=f"{_WHERE}.node_directory", hint="name a folder that every node has"
        )


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _as_our_error(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"{type(error).__name__}: {error.strerror}", where=_WHERE) from None
