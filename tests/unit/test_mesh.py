"""The device of a process, the error when there are too few, and the groups and threads of a world."""

import sys
from pathlib import Path

import pytest
import torch

from meshwright.errors import LaunchError, MeshError
from meshwright.mesh import build_mesh, choose_device, join_world, leave_world
from meshwright.rehearse.rank_pool import RankPool, this_world
from meshwright.spec import ParallelSpec


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_only_visible_device_is_number_0_for_every_rank(one_device):
    assert choose_device("auto", 3) == torch.device("cuda", 0)


def test_more_ranks_than_devices_are_refused(one_device):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        one_device.setenv(name, value)
    with pytest.raises(
        MeshError, match="8 ranks were started here, and CUDA devices that torch sees: 1"
    ) as caught:
        choose_device("auto", 0)
    assert caught.value.where == "parallel" and "device=cpu" in caught.value.hint
    assert choose_device("cpu", 0) == torch.device("cpu")
    one_device.setenv("NCCL_HOSTID", "host0")  # ranks that say they are hosts may share a card
    assert choose_device("cuda", 5) == torch.device("cuda", 0)


def test_a_variable_that_is_not_a_number_is_refused(one_device):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "two"}.items():
        one_device.setenv(name, value)
    with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE='two'"):
        choose_device("cuda", 0)


def test_a_world_of_one_leaves_tracebacks_as_they_are(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hook = sys.excepthook
    join_world("cpu")
    leave_world()
    assert sys.excepthook is hook


def _num_gloo_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_has_left_its_world_has_no_threads_of_it(monkeypatch: pytest.MonkeyPatch):
    """One that frees a tensor while the interpreter ends aborts the process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = _num_gloo_threads()
    mesh = build_mesh(ParallelSpec(), join_world("cpu"))
    in_cycle: list[object] = [mesh]  # as in modules and optimizers that know their mesh
    in_cycle.append(in_cycle)
    assert mesh.data.size() == 1 and _num_gloo_threads() > before
    del mesh, in_cycle
    leave_world()
    assert _num_gloo_threads() == before


def _groups_made(parallel: ParallelSpec) -> set[str]:
    return vars(build_mesh(parallel, this_world())).keys() & {"data", "expert"}


def test_all_pipeline_ranks_make_the_same_groups(ranks: RankPool):
    """Also those that only some stages need: torch numbers groups on each rank."""
    for settings, expected in (({}, {"data"}), ({"dp_shard": 2, "zero": 1, "ep": 2}, {"data", "expert"})):
        parallel = ParallelSpec(pp=2, **settings)
        assert ranks.run(_groups_made, parallel.num_ranks, parallel) == [expected] * parallel.num_ranks
