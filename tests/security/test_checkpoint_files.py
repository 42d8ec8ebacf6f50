"""Opening a checkpoint executes nothing, and a damaged or hostile one is one clear error."""

import ast
import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.digest import entry_of_bytes
from meshwright.checkpoint.index import INDEX, read_index
from meshwright.checkpoint.load import load_tensors, read_manifest, verify_files
from meshwright.checkpoint.save import MANIFEST, save_checkpoint
from meshwright.errors import CheckpointError

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
TENSORS = {"model.a": torch.arange(12.0).view(4, 3), "model.b": torch.tensor(4, dtype=torch.int64)}


class Gadget:
    """Unpickling this makes a folder: the sign that code was run."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.sign),)


def _save(root: Path) -> Path:
    return save_checkpoint(root, step=5, tensors=TENSORS, facts={})


def _open(folder: Path) -> dict[str, torch.Tensor]:
    verify_files(folder, read_manifest(folder))
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load_tensors(folder, found)
    return found


@pytest.fixture
def folder(ranks, tmp_path: Path) -> Path:
    return ranks.run(_save, 1, tmp_path)[0]


def _rehash(folder: Path, name: str) -> None:
    """A damage that the manifest vouches for."""
    manifest = json.loads((folder / MANIFEST).read_text())
    content = (folder / name).read_bytes()
    manifest["files"][name] = entry_of_bytes(content)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_an_intact_one_opens(folder: Path) -> None:
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in _open(folder).items())


@pytest.mark.parametrize("name", (".metadata", "shard-00000.safetensors", INDEX, MANIFEST))
def test_a_pickle_in_place_of_any_file_is_not_executed(folder: Path, tmp_path: Path, name: str) -> None:
    sign = tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Gadget(sign)))
    if name not in (MANIFEST, ".metadata"):
        _rehash(folder, name)
    if name == ".metadata":  # of torch's format: nobody reads it
        _open(folder)
    else:
        with pytest.raises(CheckpointError):
            _open(folder)
    assert not sign.exists()
    pickle.loads(pickle.dumps(Gadget(sign)))  # the gadget works
    assert sign.exists()


def _loads(tree: ast.AST) -> list[str]:
    """Calls that unpickle: of the pickle module, and torch.load without weights_only=True."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        options = {one.arg: ast.unparse(one.value) for one in node.keywords}
        if owner == "pickle" and name in ("load", "loads", "Unpickler"):
            found.append(ast.unparse(node))
        if owner == "torch" and name == "load" and options.get("weights_only") != "True":
            found.append(ast.unparse(node))
        if owner in ("dcp", "torch.distributed.checkpoint") or name == "read_metadata":
            found.append(ast.unparse(node))
    return found


def test_no_module_unpickles_files() -> None:
    """The exceptions read what this very run has sent: a worker process through a pipe, and the rank that
    reads samples for others (torch's object collectives pickle as well)."""
    found = {
        str(path.relative_to(SOURCE)): calls
        for path in SOURCE.rglob("*.py")
        if (calls := _loads(ast.parse(path.read_text())))
    }
    assert set(found) == {"rehearse/rank_pool.py", "modules/reading_group.py"}, found


def _set(*path: str | int, to: Any) -> Callable[[Any], Any]:
    def change(tree: Any) -> Any:
        tree = copy.deepcopy(tree)
        inner = tree
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to
        return tree

    return change


SHARD = "shard-00000.safetensors"
MANIFESTS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda tree: [tree],
    "a number": lambda tree: 7,
    "no files": _set("files", to=None),
    "files as a list": _set("files", to=[SHARD]),
    "a file without a size": _set("files", SHARD, to={"sha256": "0"}),
    "a size of another type": _set("files", SHARD, "bytes", to="12"),
    "a digest of another type": _set("files", SHARD, "xxh3_128", to=12),
    "a digest in a list of another type": _set("files", SHARD, "xxh3_128", to=[12]),
    "another digest": _set("files", SHARD, "xxh3_128", to=["0" * 32]),
    "too many digests": _set("files", SHARD, "xxh3_128", to=["0" * 32] * 2),
    "no size of chunks": _set("files", SHARD, "chunk_bytes", to=0),
    "a file outside of the folder": _set("files", "../other", to={"bytes": 1, "sha256": ""}),
    "an absolute file": _set("files", "/etc/passwd", to={"bytes": 1, "sha256": ""}),
    "a negative step": _set("step", to=-1),
    "a step of another type": _set("step", to="5"),
    "a true step": _set("step", to=True),
    "the step of another folder": _set("step", to=6),
    "an unknown version": _set("version", to=99),
    "a version of another type": _set("version", to=[2]),
    "an old version": _set("version", to=1),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_damaged_manifest_is_one_error(folder: Path, kind: str) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(MANIFESTS[kind](json.loads(path.read_text()))))
    with pytest.raises(CheckpointError) as caught:
        _open(folder)
    assert caught.value.where and caught.value.hint


A = ("tensors", "model.a")
INDEXES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda tree: [tree],
    "no tensors": _set("tensors", to=None),
    "another format": _set("format", to=9),
    "a tensor as text": _set(*A, to="gone"),
    "a shape of another type": _set(*A, "shape", to="4x3"),
    "a negative size": _set(*A, "shape", to=[-4, 3]),
    "a huge size": _set(*A, "shape", to=[2**63, 3]),
    "a size that is true": _set(*A, "shape", to=[True, 12]),
    "no boxes": _set(*A, "boxes", to=[]),
    "a box outside": _set(*A, "boxes", 0, "start", to=[1, 0]),
    "a box of fewer dims": _set(*A, "boxes", 0, "start", to=[0]),
    "a file outside of the folder": _set(*A, "boxes", 0, "file", to="../shard-00000.safetensors"),
    "an absolute file": _set(*A, "boxes", 0, "file", to="/etc/passwd"),
    "a file that is a list": _set(*A, "boxes", 0, "file", to=[]),
    "a file that is not there": _set(*A, "boxes", 0, "file", to="shard-00009.safetensors"),
    "another shape": lambda tree: _set(*A, "boxes", 0, "shape", to=[3, 4])(
        _set(*A, "shape", to=[3, 4])(tree)
    ),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_damaged_index_is_one_error(folder: Path, kind: str) -> None:
    path = folder / INDEX
    path.write_text(json.dumps(INDEXES[kind](json.loads(path.read_text()))))
    _rehash(folder, INDEX)
    with pytest.raises(CheckpointError) as caught:
        _open(folder)
    assert caught.value.where and caught.value.hint


@pytest.mark.parametrize("text", ("", "{", "[" * 100_000, "\x00" * 64, '{"a": 1e999999}'))
@pytest.mark.parametrize("name", (MANIFEST, INDEX))
def test_text_that_is_no_such_file_is_one_error(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    if name != MANIFEST:
        _rehash(folder, name)
    with pytest.raises(CheckpointError):
        _open(folder)


def test_a_fifo_does_not_block(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(CheckpointError):
        read_manifest(folder)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _huge_header(content: bytes) -> bytes:
    return (2**60).to_bytes(8, "little") + content[8:]


def _long_ranges(content: bytes) -> bytes:
    return content.replace(b'"data_offsets": [8, 56]', b'"data_offsets": [8, 99]')


@pytest.mark.parametrize("damage", (_cut, _huge_header, _long_ranges, lambda content: b""))
def test_a_shard_damaged_under_a_matching_hash_is_one_error(folder: Path, damage: Any) -> None:
    path = folder / SHARD
    changed = damage(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    _rehash(folder, SHARD)
    with pytest.raises(CheckpointError):
        _open(folder)


def test_a_flipped_bit_is_found_before_anything_is_read(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1
    (folder / SHARD).write_bytes(content)
    with pytest.raises(CheckpointError, match="differ from the manifest"):
        verify_files(folder, read_manifest(folder))
    assert read_index(folder)["model.a"].shape == (4, 3)
