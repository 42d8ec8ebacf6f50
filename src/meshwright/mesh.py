"""Which rank stands where: one world of ranks seen as a mesh of named axes.

The same ranks are cut twice, because state and activations are cut differently:

    sequence   pp, dp_replicate, dp_shard, cp, tp        activations: who holds which tokens
    dense      pp, dp_replicate, shard, tp               parameters: shard = dp_shard x cp
    expert     pp, dp_replicate, expert_shard, ep, tp    routed experts: shard = expert_shard x ep

tp is innermost, so its ranks are neighbours on a node. Building a Mesh communicates: all ranks call it.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import threading
import time
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import LaunchError, MeshError
from meshwright.spec import ParallelSpec

# A collective on a card ends within milliseconds of being told to; freeing what it used takes up to seconds.
ENDING_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others, and the device it computes on."""

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    store: dist.Store | None = None
    """Where ranks leave words for each other; it outlives process groups."""

    @property
    def is_first(self) -> bool:
        """Rank 0 is the one that speaks to people."""
        return self.rank == 0


def _rank_variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise LaunchError(
            f"{name}={text!r} is not a rank", where="environment", hint="start through torchrun or train"
        )
    return int(text)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process: `auto` takes CUDA where there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MeshError(
            "device=cuda, but torch sees no CUDA device", where="device", hint="use device=cpu or auto"
        )
    _require_cards(torch.cuda.device_count())
    # Some launchers show each rank its own card only: then that one is 0 for all of them.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _require_cards(num_cards: int) -> None:
    """A card for each rank: NCCL allows no two on one, unless they pretend to be on hosts of their own."""
    num_here = _rank_variable("LOCAL_WORLD_SIZE", 1)
    if num_here > num_cards and "NCCL_HOSTID" not in os.environ:
        raise MeshError(
            f"{num_here} ranks were started here, and CUDA devices that torch sees: {num_cards}",
            where="parallel",
            hint="start no more ranks than devices on a machine, or use device=cpu",
        )


def join_world(device: str = "auto", *, timeout_seconds: float = 1800.0) -> World:
    """Join the ranks that the launcher's variables describe; one rank alone is a world of one."""
    rank, num_ranks = _rank_variable("RANK", 0), _rank_variable("WORLD_SIZE", 1)
    local_rank = _rank_variable("LOCAL_RANK", 0)
    if rank >= num_ranks:
        raise LaunchError(
            f"RANK={rank} is outside a world of {num_ranks}", where="environment", hint="ranks count from 0"
        )
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        # Segments that grow in place leave no gaps between activations of different sizes. Read at the first
        # allocation; what the user says counts.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(chosen)
    world = World(rank=rank, local_rank=local_rank, num_ranks=num_ranks, device=chosen)
    if dist.is_initialized():
        return world
    timeout = datetime.timedelta(seconds=timeout_seconds)
    found = None if num_ranks == 1 else next(dist.rendezvous("env://", rank, num_ranks, timeout=timeout))
    world = dataclasses.replace(world, store=found[0] if found else dist.HashStore())
    _form_groups(world, "world", timeout)
    return world


def rejoin_world(world: World, attempt: int, *, timeout_seconds: float = 1800.0) -> World:
    """The same ranks in new process groups, after a step that some of them left half-way; all call it."""
    abandon_world(world)
    _form_groups(world, f"world-{attempt}", datetime.timedelta(seconds=timeout_seconds))
    return world


def _form_groups(world: World, prefix: str, timeout: datetime.timedelta) -> None:
    assert world.store is not None
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store = dist.PrefixStore(prefix, world.store)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.num_ranks, timeout=timeout
    )


def abandon_world(world: World) -> None:
    """Leave without waiting for collectives that will never end: a partner has left them."""
    if not dist.is_initialized():
        return
    if end_device_collectives(world):
        dist.destroy_process_group()
    else:  # then the end of the process would wait for them too: a thread that needs nothing ends it
        faulthandler.dump_traceback_later(ENDING_SECONDS, exit=True)


def end_device_collectives(world: World) -> bool:
    """Let every collective on a card end as it is, and tell whether all did; from any thread.

    What gloo does on the host goes on. All groups at once: torch ends a group's collective and then frees its
    memory, which waits for the whole card, and with it for collectives of groups that were not told yet.
    """
    threads = [
        threading.Thread(target=_end_collectives, args=(on_card,), name="ending", daemon=True)
        for _, on_card in _device_groups(world)
    ]
    for thread in threads:
        thread.start()
    latest = time.monotonic() + ENDING_SECONDS
    for thread in threads:
        thread.join(max(0.0, latest - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _end_collectives(on_card: Any) -> None:
    with contextlib.suppress(RuntimeError):  # ended already
        on_card.abort()


def connect_device_groups(world: World) -> None:
    """Let all groups on a card find their partners now; all ranks call it.

    NCCL does that in a group's first collective. A partner that never comes is then waited for by the host,
    inside NCCL, where nothing can end it.
    """
    for group, _ in _device_groups(world):
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=world.device), group=group)


def _device_groups(world: World) -> list[tuple[dist.ProcessGroup, Any]]:
    """Groups with a part on the card, and that part, in the order in which they were made.

    Private: there is no public list of all groups, nor of the parts of a group by device.
    """
    found: list[tuple[dist.ProcessGroup, Any]] = []
    if world.device.type != "cuda":
        return found
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group of the hosts has no part on the card
            found.append((group, group._get_backend(world.device)))
    return found


def leave_world() -> None:
    """Tear the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The world cut along the axes of a ParallelSpec."""

    parallel: ParallelSpec
    device: torch.device
    rank: int
    sequence: DeviceMesh
    dense: DeviceMesh

    @cached_property
    def expert(self) -> DeviceMesh:
        """The same ranks as the routed experts see them."""
        p = self.parallel
        shape = (p.pp, p.dp_replicate, p.dp_shard * p.cp // p.ep, p.ep, p.tp)
        return init_device_mesh(
            self.device.type, shape, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep", "tp")
        )

    @cached_property
    def data(self) -> DeviceMesh:
        """dp_replicate and shard as one axis: all ranks that hold other tokens of the same step."""
        p = self.parallel
        return init_device_mesh(
            self.device.type, (p.pp, p.dp * p.cp, p.tp), mesh_dim_names=("pp", "data", "tp")
        )

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along one axis of `sequence`."""
        return self.sequence.get_group(axis)

    def coordinate(self, axis: str) -> int:
        """Where this rank stands along one axis of `sequence`."""
        return self.sequence.get_local_rank(axis)

    @property
    def dp_rank(self) -> int:
        """Which samples this rank reads, of `parallel.dp` parts."""
        return self.coordinate("dp_replicate") * self.parallel.dp_shard + self.coordinate("dp_shard")


def build_mesh(parallel: ParallelSpec, world: World) -> Mesh:
    """Cut the world along the axes; every rank must call this with the same spec."""
    p = parallel
    if p.num_ranks != world.num_ranks:
        raise MeshError(
            f"parallel asks for {p.num_ranks} ranks (pp={p.pp} x dp_replicate={p.dp_replicate} x "
            f"dp_shard={p.dp_shard} x cp={p.cp} x tp={p.tp}), but {world.num_ranks} were started",
            where="parallel",
            hint=f"start {p.num_ranks} ranks, or change one axis",
        )
    kind = world.device.type
    sequence = init_device_mesh(
        kind,
        (p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )
    dense = init_device_mesh(
        kind,
        (p.pp, p.dp_replicate, p.dp_shard * p.cp, p.tp),
        mesh_dim_names=("pp", "dp_replicate", "shard", "tp"),
    )
    return Mesh(parallel=p, device=world.device, rank=world.rank, sequence=sequence, dense=dense)
