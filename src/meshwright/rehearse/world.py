"""One rank of a world whose other ranks do not exist.

torch's `fake` process group completes every collective at once and moves nothing, so a single process can be
rank k of N. What is private to torch here, and used in this file only: the fake group's store in torch's
testing package; the vote among pipeline stages before the first step; the names of process groups.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.errors import MeshError
from meshwright.mesh import Mesh, World, build_mesh, leave_world
from meshwright.rehearse.torch_dtensor_cache import forget_meshes
from meshwright.spec import ParallelSpec
from meshwright.spec.parallel import MESH_ORDER, mesh_coordinates


@contextlib.contextmanager
def fake_world(parallel: ParallelSpec, rank: int, device: torch.device) -> Iterator[Mesh]:
    """The mesh of rank `rank`, with process groups that do not communicate."""
    require_rank(parallel, rank)
    num_ranks = parallel.num_ranks
    if dist.is_initialized():
        raise MeshError(
            "this process is a rank of another world already",
            where="rehearse",
            hint="rehearse in a process of its own, outside of torchrun",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        mesh = build_mesh(parallel, World(rank=rank, local_rank=0, num_ranks=num_ranks, device=device))
        _make_groups(mesh)
        with _no_vote():
            yield mesh
    finally:
        leave_world()
        forget_meshes()


def require_rank(parallel: ParallelSpec, rank: int) -> None:
    """MeshError when the world has no such rank."""
    if not 0 <= rank < parallel.num_ranks:
        last = parallel.num_ranks - 1
        raise MeshError(
            f"rank {rank} is outside a world of {parallel.num_ranks} rank{'s' * (last > 0)}",
            where="--rank",
            hint=f"ranks count from 0 to {last}" if last else "its only rank is 0",
        )


def _make_groups(mesh: Mesh) -> None:
    """Create the lazy meshes now: creating them inside a trace would compute on fake tensors."""
    if mesh.parallel.ep > 1:
        _ = mesh.expert
    _ = mesh.data


@contextlib.contextmanager
def _no_vote() -> Iterator[None]:
    """Inside, pipeline stages skip the vote on whether all shapes are static (torch 2.13 and later)."""
    schedule: Any = schedules._PipelineSchedule
    if not hasattr(schedule, "_warmup_p2p"):
        yield
        return
    known = schedules.InferenceMode.STATIC  # pyright: ignore[reportAttributeAccessIssue]

    def agree(_: Any, stages: list[Any], *args: Any) -> None:
        for stage in stages:
            stage._inference_mode = known

    with patch.object(schedule, "_warmup_p2p", agree):
        yield


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of this name, as operators in compiled graphs refer to it; None for other text."""
    known = distributed_c10d._world.pg_names.items()
    return next((group for group, its_name in known if its_name == name), None)


def axis_of(group: dist.ProcessGroup, mesh: Mesh) -> str:
    """The mesh axes along which the ranks of a group differ, such as `tp` or `dp_shard x cp`; or `ep`."""
    if mesh.parallel.ep > 1 and group.group_name == mesh.expert.get_group("ep").group_name:
        return "ep"
    coordinates = [mesh_coordinates(mesh.parallel, rank) for rank in dist.get_process_group_ranks(group)]
    differing = [axis for axis in MESH_ORDER if len({one[axis] for one in coordinates}) > 1]
    return " x ".join(differing) or "one rank"
