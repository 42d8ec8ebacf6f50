"""Shard files: written in chunks, verified chunk by chunk while they are read, in both format versions."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.checkpoint import chunked_write, digest, shard_file, shard_read
from meshwright.checkpoint.chunk_read import ChunkedFile, is_intact
from meshwright.checkpoint.digest import DamagedCheckpoint, entry_of_bytes
from meshwright.checkpoint.load import load_tensors, read_manifest, verify_files
from meshwright.checkpoint.save import MANIFEST, save_checkpoint
from meshwright.checkpoint.shard_file import write_shard_file
from meshwright.checkpoint.shard_read import BoxPart

SMALL_CHUNK = 4096
SHARD = "shard-00000.safetensors"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes have several chunks."""
    for module in (digest, chunked_write):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK)


def _tensors() -> dict[str, Tensor]:
    numbers = torch.arange(5000.0)
    return {
        "rows": numbers.view(50, 100),
        "gaps": numbers.view(50, 100).t()[::2],
        "bytes": torch.arange(4097).to(torch.uint8),
        "half": numbers[:333].to(torch.bfloat16),
        "none": torch.empty(0),
        "one": torch.tensor(7),
    }


def _save(root: Path) -> Path:
    with (
        patch.object(digest, "CHUNK_BYTES", SMALL_CHUNK),
        patch.object(chunked_write, "CHUNK_BYTES", SMALL_CHUNK),
    ):
        return save_checkpoint(root, step=1, tensors=_saved_tensors(), facts={})


def _saved_tensors() -> dict[str, Tensor]:
    """A tensor without elements is not saved."""
    return {name: tensor for name, tensor in _tensors().items() if tensor.numel()}


@pytest.mark.usefixtures("small_chunks")
def test_any_tool_reads_what_was_written_and_the_digests_are_those_of_the_file(tmp_path: Path) -> None:
    entry = write_shard_file(tmp_path / "file", _tensors())
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in _tensors().items())
    content = (tmp_path / "file").read_bytes()
    assert entry == entry_of_bytes(content)
    assert entry["bytes"] == len(content) and len(entry["xxh3_128"]) > 8


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("refused", ("open", "write"))
def test_file_systems_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_write = os.open, os.pwrite
    direct: set[int] = set()

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        descriptor = real_open(path, flags & ~os.O_DIRECT, *rest, **options)
        if flags & os.O_DIRECT and refused == "open":
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no direct writes here")
        return descriptor

    def written(descriptor: int, content: memoryview, offset: int) -> int:
        if refused == "write" and offset % SMALL_CHUNK == 0 and offset not in direct:
            direct.add(offset)
            raise OSError(errno.EINVAL, "blocks of another size")
        return real_write(descriptor, content[:1000], offset)  # fewer than asked for

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    entry = write_shard_file(tmp_path / "file", _tensors())
    assert entry == entry_of_bytes((tmp_path / "file").read_bytes())


@pytest.mark.usefixtures("small_chunks")
def test_a_failing_disk_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard_file(tmp_path / "file", _tensors())


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    return ranks.run(_save, 1, tmp_path)[0]


def _load(folder: Path) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in _saved_tensors().items()}
    load_tensors(folder, found, files=read_manifest(folder)["files"])
    return found


def test_verified_load(saved: Path) -> None:
    assert all(torch.equal(tensor, _tensors()[name]) for name, tensor in _load(saved).items())
    assert len(read_manifest(saved)["files"][SHARD]["xxh3_128"]) > 8


@pytest.mark.parametrize("verified", (True, False))
@pytest.mark.parametrize("block_bytes", (1, 3000, 1 << 20))
def test_targets_of_other_layouts_and_dtypes(
    saved: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, verified: bool
) -> None:
    """Columns of a tensor with gaps, another dtype, rows: read by blocks of rows, or straight."""
    monkeypatch.setattr(shard_read, "_BLOCK_BYTES", block_bytes)
    entries = read_manifest(saved)["files"] if verified else None
    memory = torch.zeros(40, 100)
    wanted = {
        "columns": BoxPart(SHARD, "rows", (slice(3, 50), slice(10, 31)), torch.zeros(47, 21)),
        "gaps": BoxPart(SHARD, "rows", (slice(7, 27), slice(0, 100)), memory[::2]),
        "cast": BoxPart(SHARD, "half", (slice(5, 300),), torch.zeros(295, dtype=torch.float64)),
        "rows": BoxPart(SHARD, "bytes", (slice(11, 4090),), torch.zeros(4079, dtype=torch.uint8)),
        "one": BoxPart(SHARD, "one", (), torch.tensor(0.0)),
    }
    for is_direct in (False, True):
        with shard_read.ShardFiles(saved, entries, is_direct=is_direct) as files:
            files.read(wanted.values())
        for part in wanted.values():
            expected = _tensors()[part.name][part.slices].to(part.target.dtype)
            assert torch.equal(part.target, expected)
            part.target.zero_()


def test_a_file_system_without_direct_reads(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it refuses the flag, or the first read: the page cache serves."""
    real_open, real_read = os.open, os.preadv
    refused: list[str] = []

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and "open" not in refused:
            refused.append("open")
            raise OSError(errno.EINVAL, "no direct reads here")
        return real_open(path, flags, *rest, **options)

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == SMALL_CHUNK and "read" not in refused:
            refused.append("read")
            raise OSError(errno.EINVAL, "blocks of another size")
        return real_read(descriptor, [buffers[0][:1000]], offset)  # fewer than asked for

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    for _ in range(2):
        assert all(torch.equal(tensor, _tensors()[name]) for name, tensor in _load(saved).items())
    assert sorted(refused) == ["open", "read"]


@pytest.mark.parametrize("place", (0, 5000, 12_000, 30_000, -1))
def test_a_flipped_bit_anywhere_is_found_while_loading(saved: Path, place: int) -> None:
    content = bytearray((saved / SHARD).read_bytes())
    content[place] ^= 4
    (saved / SHARD).write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        _load(saved)


@pytest.mark.parametrize("damage", ("missing", "truncated", "longer"))
def test_files_of_another_size_are_found(saved: Path, damage: str) -> None:
    path = saved / SHARD
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "truncated" else content + b" ")
    with pytest.raises(DamagedCheckpoint):
        _load(saved)


def test_a_disk_that_cannot_read_is_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DamagedCheckpoint, match="Input/output error"):
        _load(saved)


def test_a_checkpoint_of_format_version_2_opens_and_its_damage_is_found(saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["version"] = 2
    for name in manifest["files"]:
        content = (saved / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    verify_files(saved, read_manifest(saved))
    assert all(torch.equal(tensor, _tensors()[name]) for name, tensor in _load(saved).items())
    with (saved / SHARD).open("r+b") as stream:
        stream.seek(20_000)
        stream.write(b"#")
    with pytest.raises(DamagedCheckpoint):
        _load(saved)
    with pytest.raises(DamagedCheckpoint):
        verify_files(saved, read_manifest(saved))


def test_only_the_chunks_of_the_wanted_tensor_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    read_chunk = ChunkedFile.read

    def counted(self: ChunkedFile, chunk: int, *rest: Any) -> None:
        read.append(chunk)
        read_chunk(self, chunk, *rest)

    monkeypatch.setattr(ChunkedFile, "read", counted)
    found = {"one": torch.tensor(0)}
    load_tensors(saved, found, files=read_manifest(saved)["files"])
    assert found["one"] == 7 and set(read) == {0}


def test_an_empty_file_is_intact(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert is_intact(tmp_path / "empty", entry_of_bytes(b""))
    assert not is_intact(tmp_path / "empty", entry_of_bytes(b"x"))


def test_a_tensor_with_gaps_is_made_contiguous_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_write, "CHUNK_BYTES", SMALL_CHUNK)
    parts = shard_file._FileParts(b"header..", [_tensors()["gaps"]])
    first, second = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    parts.fill(first, 8)
    parts.fill(second, 16)
    assert parts._flat.cache_info().misses == 1
