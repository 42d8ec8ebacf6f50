"""Local checkpoints: on every node its own files and a copy of its neighbour's; a lost node is made good."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.checkpoint import file_exchange
from meshwright.checkpoint.assign import BoxAssignment
from meshwright.checkpoint.file_exchange import FileCopy, exchange_files
from meshwright.checkpoint.load import load_tensors, needed_files, read_manifest
from meshwright.checkpoint.local_marker import local_step
from meshwright.checkpoint.local_tier import LocalTier
from meshwright.checkpoint.nodes import Nodes
from meshwright.errors import CheckpointError
from meshwright.spec.checkpoint import LocalSpec

STEP = "step-00000003"
ROWS = torch.arange(66.0).view(11, 6)


def _tier(place: Path, *, replicate: bool = True) -> LocalTier:
    """Two ranks on each node, whose disk is a folder."""
    disk = place / f"node{dist.get_rank() // 2}"
    for folder in (disk, place / "run"):
        folder.mkdir(exist_ok=True, parents=True)
    return LocalTier(
        LocalSpec(save_every_steps=1, node_directory=str(disk), neighbour_copy=replicate), place / "run"
    )


def _tensors(*, scale: float = 1.0) -> dict[str, Tensor]:
    """A sharded tensor, and replicated ones that some rank writes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.tensor_split(
        ROWS * scale, [(r + 1) * -(-11 // mesh.size()) for r in range(mesh.size() - 1)]
    )
    rows = DTensor.from_local(
        local[dist.get_rank()], mesh, [Shard(0)], shape=ROWS.shape, stride=ROWS.stride()
    )
    return {"rows": rows, **{f"same.{n}": torch.full((5,), n * scale) for n in range(8)}}


def _save(place: Path, step: int = 3, scale: float = 1.0, replicate: bool = True) -> None:
    tier, assignment = _tier(place, replicate=replicate), BoxAssignment()
    mine = assignment.local_tensors(_tensors(scale=scale))
    tier.write(step, mine, assignment.index, {"rank": dist.get_rank()}, None)
    dist.barrier()


def _restore(place: Path, *, replicate: bool = True) -> tuple[list[str], list[str], bool]:
    """Names of complete checkpoints, files on this node then, and whether all tensors are as saved."""
    tier, wanted = _tier(place, replicate=replicate), _tensors(scale=0.0)
    names = tier.complete()
    if not names:
        return names, [], False
    folder = tier.fetch_index(names[-1])
    tier.fetch_files(names[-1], needed_files(folder, wanted))
    load_tensors(folder, wanted, files=read_manifest(folder)["files"])
    expected = _tensors()
    local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in wanted.items()}
    same = all(
        torch.equal(local[name], one.to_local() if isinstance(one, DTensor) else one)
        for name, one in expected.items()
    )
    dist.barrier()
    return names, sorted(path.name for path in folder.glob("shard-*")), same


def _folder(place: Path, node: int) -> Path:
    return next((place / f"node{node}").glob("meshwright-*"))


def _files(place: Path, node: int) -> list[str]:
    return sorted(path.name for path in (_folder(place, node) / STEP).glob("shard-*"))


def test_each_node_has_its_files_and_with_replicas_its_neighbours(ranks: Any, tmp_path: Path) -> None:
    ranks.run(_save, 4, tmp_path / "with")
    assert [len(_files(tmp_path / "with", node)) for node in (0, 1)] == [4, 4]
    ranks.run(_save, 4, tmp_path / "without", 3, 1.0, False)
    assert not set(_files(tmp_path / "without", 0)) & set(_files(tmp_path / "without", 1))
    assert local_step(tmp_path / "with" / "run") == 3


@pytest.mark.parametrize("lost", (0, 1))
def test_a_lost_disk_is_restored_from_the_neighbours_copy(ranks: Any, tmp_path: Path, lost: int) -> None:
    ranks.run(_save, 4, tmp_path)
    shutil.rmtree(_folder(tmp_path, lost))
    for names, files, same in ranks.run(_restore, 4, tmp_path):
        assert (names, same) == ([STEP], True)
        assert files


def test_fewer_ranks_resume_from_the_node_that_is_left(ranks: Any, tmp_path: Path) -> None:
    ranks.run(_save, 4, tmp_path)
    shutil.rmtree(_folder(tmp_path, 1))
    assert [same for _, _, same in ranks.run(_restore_on_one_node, 2, tmp_path)] == [True, True]


def _restore_on_one_node(place: Path) -> tuple[list[str], list[str], bool]:
    return _restore(place, replicate=False)


def test_without_copies_a_lost_disk_leaves_nothing_complete(ranks: Any, tmp_path: Path) -> None:
    ranks.run(_save, 4, tmp_path, 3, 1.0, False)
    shutil.rmtree(_folder(tmp_path, 0))
    assert ranks.run(_restore_without_copies, 4, tmp_path)[0][0] == []


_restore_without_copies = _restore_on_one_node


def test_without_copies_nodes_get_the_files_that_they_lack(ranks: Any, tmp_path: Path) -> None:
    ranks.run(_save, 4, tmp_path, 3, 1.0, False)
    assert all(same for _, _, same in ranks.run(_restore_without_copies, 4, tmp_path))


def test_nodes_with_different_saves_of_a_step_are_not_mixed(ranks: Any, tmp_path: Path) -> None:
    """One node has published a repeated step, and the other was killed before it could."""
    ranks.run(_save, 4, tmp_path, 3, 1.0, False)
    shutil.copytree(_folder(tmp_path, 1), tmp_path / "old")
    ranks.run(_save, 4, tmp_path, 3, 2.0, False)
    shutil.rmtree(_folder(tmp_path, 1) / STEP)
    shutil.copytree(tmp_path / "old" / STEP, _folder(tmp_path, 1) / STEP)
    assert ranks.run(_restore_without_copies, 4, tmp_path)[0][0] == []


def _save_twice_and_remove(place: Path) -> list[str]:
    _save(place, 3)
    _save(place, 4)
    tier = _tier(place)
    names = tier.complete()
    dist.barrier()
    tier.remove()
    dist.barrier()
    return names


def test_one_is_kept_and_none_after_the_end(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(_save_twice_and_remove, 4, tmp_path)[0] == ["step-00000004"]
    assert not list(tmp_path.glob("node*/*")) and local_step(tmp_path / "run") == 0


def test_a_new_run_directory_does_not_see_the_old_ones(ranks: Any, tmp_path: Path) -> None:
    ranks.run(_save, 4, tmp_path)
    shutil.rmtree(tmp_path / "run")
    assert ranks.run(_restore, 4, tmp_path)[0][0] == []


def _refused(directory: str, replicate: bool) -> str:
    spec = LocalSpec(save_every_steps=1, node_directory=directory, neighbour_copy=replicate)
    with pytest.raises(CheckpointError) as caught:
        LocalTier(spec, Path("/nowhere"))
    return caught.value.fact


def test_a_missing_folder_and_copies_without_a_neighbour_are_refused(ranks: Any, tmp_path: Path) -> None:
    assert "no folder that can be written to" in ranks.run(_refused, 2, "$NO_SUCH_VARIABLE/x", False)[1]
    assert "there is no neighbour" in ranks.run(_refused, 2, str(tmp_path), True)[0]


def _exchange_with_a_full_disk(place: Path) -> str:
    rank = dist.get_rank()
    folder = place / str(rank)
    folder.mkdir(parents=True)
    (folder / f"file{rank}").write_bytes(bytes(1000))
    dist.barrier()
    copies = [FileCopy("file0", 1000, 0, 1), FileCopy("file1", 1000, 1, 0)]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with patch.object(file_exchange, "_CHUNK_BYTES", 300):
        try:
            if rank == 1:
                with patch.object(file_exchange.os, "fsync", full):
                    exchange_files(copies, folder)
            else:
                exchange_files(copies, folder)
        except OSError as error:
            return str(error.strerror)
    return "" if (folder / "file1").read_bytes() == bytes(1000) else "not copied"


def test_a_full_disk_is_an_error_there_and_the_peer_does_not_wait(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(_exchange_with_a_full_disk, 2, tmp_path) == ["", "No space left on device"]
    assert not (tmp_path / "1" / "file0").exists()


def test_copies_go_around_uneven_nodes() -> None:
    nodes = Nodes(((0, 1, 2), (3,), (4, 5)), rank=3)
    assert [nodes.copy_holder(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]
    assert (nodes.node, nodes.is_leader, nodes.leader(2)) == (1, True, 4)
