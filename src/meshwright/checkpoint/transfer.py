"""Copies complete checkpoints between the run directory and its second place; all ranks take a share."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.chunk_read import is_intact
from meshwright.checkpoint.load import read_manifest
from meshwright.checkpoint.remote import Remote
from meshwright.checkpoint.save import MANIFEST, PARTIAL, on_all_ranks, publish_folder
from meshwright.errors import CheckpointError

_NUM_DOWNLOADS = 3
"""Attempts at a file whose content is not what the manifest says."""


def upload_checkpoint(
    folder: Path, remote: Remote, *, keep_copies: int | None, group: dist.ProcessGroup | None = None
) -> None:
    """Copy a complete checkpoint to the second place, its manifest last; all ranks call it. Communicates.

    Each rank copies a share of the files and reads them back. A checkpoint of the same step that this run has
    copied before is replaced. CheckpointError on all ranks where one fails.
    """
    manifest = on_all_ranks(lambda: read_manifest(folder), group)
    place = _begun_on_first_rank(remote, folder.name, group)
    on_all_ranks(lambda: _upload_share(folder, manifest, remote, place), group)
    _on_first_rank(lambda: remote.publish(folder / MANIFEST, folder.name, place), group)
    if keep_copies is not None:
        _on_first_rank(lambda: _delete_old(remote, keep_copies), group)


def download_checkpoint(name: str, remote: Remote, root: Path) -> Path:
    """Copy a checkpoint into the run directory and publish it there; all ranks call it. Communicates.

    Every file is compared with its digests, and fetched again where it differs. CheckpointError on all ranks
    where one cannot be fetched.
    """
    partial = root / f"{PARTIAL}{name.removeprefix('step-')}"
    try:
        _on_first_rank(lambda: _prepare(name, remote, partial))
        manifest = on_all_ranks(lambda: read_manifest(partial))
        on_all_ranks(lambda: _download_share(name, manifest, remote, partial))
        _on_first_rank(lambda: publish_folder(partial, root / name))
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return root / name


def complete_on_remote(remote: Remote) -> list[str]:
    """Names of the complete checkpoints there, oldest first; rank 0 lists them for all. Communicates."""
    found: list[str] = []
    _on_first_rank(lambda: found.extend(remote.complete()))
    shared = [found]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _on_first_rank(action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    on_all_ranks(lambda: _as_our_error(action) if dist.get_rank() == 0 else None, group)


def _begun_on_first_rank(remote: Remote, step_name: str, group: dist.ProcessGroup | None) -> str:
    found: list[str] = []
    _on_first_rank(lambda: found.append(remote.begin(step_name)), group)
    shared = found or [""]
    dist.broadcast_object_list(shared, src=0, group=group)
    return shared[0]


def _as_our_error(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(
            f"{type(error).__name__}: {error.strerror}", where="a checkpoint's copy"
        ) from None


def _delete_old(remote: Remote, keep_copies: int) -> None:
    for name in remote.complete()[:-keep_copies]:
        remote.delete(name)


def _share(manifest: dict[str, Any]) -> list[str]:
    return sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]


def _upload_share(folder: Path, manifest: dict[str, Any], remote: Remote, place: str) -> None:
    for name in _share(manifest):
        remote.put(folder / name, place, manifest["files"][name])


def _prepare(name: str, remote: Remote, partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    remote.fetch_manifest(name, partial / MANIFEST)


def _download_share(name: str, manifest: dict[str, Any], remote: Remote, partial: Path) -> None:
    for file in _share(manifest):
        _download(name, manifest, file, remote, partial / file)


def _download(name: str, manifest: dict[str, Any], file: str, remote: Remote, target: Path) -> None:
    for attempt in range(_NUM_DOWNLOADS):
        remote.fetch(name, manifest, file, target)
        if is_intact(target, manifest["files"][file]):
            return
        time.sleep(0.1 * 2**attempt)
    raise CheckpointError(
        f"{name}/{file} differs from its manifest in {_NUM_DOWNLOADS} downloads",
        where="the copy of a checkpoint",
        hint="an older copy is tried next",
    )
