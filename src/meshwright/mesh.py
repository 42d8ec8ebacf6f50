"""The device mesh: the ranks of a run arranged along named axes.

The same ranks are arranged three times, because activations, parameters and experts are sharded differently:

    sequence   pp, dp_replicate, dp_shard, cp, tp        activations: which rank has which tokens
    dense      pp, dp_replicate, shard, tp               parameters: shard = dp_shard x cp
    expert     pp, dp_replicate, expert_shard, ep, tp    routed experts: shard = expert_shard x ep

tp is innermost, so its ranks are adjacent on a node. Building a Mesh communicates: all ranks call it.
"""

import atexit
import dataclasses
import datetime
import gc
import os
import sys
import time
from functools import cache, cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import MeshError, SpecError
from meshwright.launch.affinity import THREADS, bind, choose_cores, this_host
from meshwright.launch.launched import LaunchedRank, launched_rank
from meshwright.launch.links import set_links
from meshwright.launch.meeting import find_meeting
from meshwright.rendezvous import meet
from meshwright.spec import LaunchSpec, NcclSpec, ParallelSpec, ResilienceSpec

# gloo connects every rank to every other at the start: n messages and n connections on each of n ranks. Above
# this number of ranks it connects two ranks when they first exchange something (docs/decisions: many ranks).
_MESHED_RANKS = 256
# In this time a thread of gloo frees the tensors of the last collective, also on a busy machine.
_FREEING_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others, and the device it computes on."""

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    notes: tuple[str, ...] = ()
    """Lines for rank 0 to print: its cores and threads, and variables that contradict the run file."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints."""
        return self.rank == 0


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process: `auto` means CUDA where there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MeshError(
            "device=cuda, but torch sees no CUDA device", where="device", hint="use device=cpu or auto"
        )
    _require_devices(torch.cuda.device_count())
    # Some launchers make only its own device visible to each rank: then it is number 0 for all of them.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _require_devices(num_devices: int) -> None:
    """Refuse two ranks on one device; NCCL allows that only to ranks that claim to be different hosts."""
    launched = launched_rank()
    num_here = (launched.num_local_ranks if launched else None) or 1
    if num_here > num_devices and "NCCL_HOSTID" not in os.environ:
        raise MeshError(
            f"{num_here} ranks were started here, and CUDA devices that torch sees: {num_devices}",
            where="parallel",
            hint="start no more ranks than devices on a machine, or use device=cpu",
        )


def join_world(
    device: str = "auto",
    *,
    resilience: ResilienceSpec | None = None,
    launch: LaunchSpec | None = None,
    run_dir: Path | None = None,
) -> World:
    """Join the ranks that the launcher's variables describe; one rank alone is a world of one.

    `run_dir` holds the secret of a run whose ranks meet at an address. All ranks call it, and wait for each
    other. A rank that a launcher started is bound to its cores first, and gets its threads and the settings
    of its links. A process that has joined already stays in its world.
    """
    launched = launched_rank()
    chosen = choose_device(device, launched.local_rank if launched else 0)
    if chosen.type == "cuda":
        # Segments that grow in place leave no gaps between activations of different sizes. Read at the first
        # allocation; a value that the user has set stays.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        return _world(launched, chosen)
    notes = _prepare_host(launched, chosen, launch or LaunchSpec()) if launched else ()
    world = dataclasses.replace(_world(launched, chosen), notes=notes)
    _init_process_group(world, launched, resilience or ResilienceSpec(), run_dir)
    _wait_for_threads_at_exit()
    return world


@cache
def _wait_for_threads_at_exit() -> None:
    """Let the threads of gloo finish before the interpreter ends: see `leave_world`. The groups of a model
    that a user's script still refers to live until then."""
    atexit.register(time.sleep, _FREEING_SECONDS)


def _prepare_host(launched: LaunchedRank, device: torch.device, launch: LaunchSpec) -> tuple[str, ...]:
    """Bind this rank to its cores, set its threads and the variables of its links; returns notes."""
    if device.type == "cpu" and launch.nccl != NcclSpec():
        raise SpecError(
            "launch.nccl is set, and this run is on CPUs, where NCCL is not used",
            where="launch.nccl",
            hint="remove launch.nccl, or use device=cuda",
        )
    host = this_host(_pci_address(device))
    choice = choose_cores(launch, launched, host, os.environ)
    if choice.cores is not None:
        bind(choice.cores)
    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
        os.environ[THREADS] = str(choice.threads)  # for the processes that this one starts
    return (choice.text(host), *set_links(launch, os.environ, is_on_gpu=device.type == "cuda"))


def _pci_address(device: torch.device) -> str | None:
    """`0000:17:00.0` of a CUDA device; None for a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _world(launched: LaunchedRank | None, device: torch.device) -> World:
    if launched is None:
        return World(rank=0, local_rank=0, num_ranks=1, device=device)
    return World(launched.rank, launched.local_rank, launched.num_ranks, device)


def _init_process_group(
    world: World, launched: LaunchedRank | None, resilience: ResilienceSpec, run_dir: Path | None
) -> None:
    if launched is None or launched.num_ranks == 1:
        store: dist.Store = dist.HashStore()
    else:
        seconds = resilience.start_timeout_seconds
        store = meet(launched, find_meeting(launched), timeout_seconds=seconds, run_dir=run_dir)
    if world.num_ranks > _MESHED_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    hook = sys.excepthook
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=datetime.timedelta(seconds=resilience.longest_seconds),
    )
    # torch puts `[rank0]:` before each line of a traceback: needless on one rank, and once more for every
    # process group that a process has had.
    if world.num_ranks == 1 or hook.__module__.startswith("torch."):
        sys.excepthook = hook


def leave_world() -> None:
    """Destroy the process groups, if there are any, and end their threads.

    A thread of gloo that frees a tensor while the interpreter ends aborts the process (SIGABRT). The threads
    end with their group, and reference cycles of meshes keep groups alive.
    """
    if dist.is_initialized():
        has_threads = dist.get_backend() != "fake"
        dist.destroy_process_group()
        if has_threads:
            gc.collect()


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The ranks of the world along the axes of a ParallelSpec."""

    parallel: ParallelSpec
    device: torch.device
    rank: int
    sequence: DeviceMesh
    dense: DeviceMesh

    @cached_property
    def expert(self) -> DeviceMesh:
        """The ranks along the axes that shard routed experts."""
        p = self.parallel
        shape = (p.pp, p.dp_replicate, p.dp_shard * p.cp // p.ep, p.ep, p.tp)
        return init_device_mesh(
            self.device.type, shape, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep", "tp")
        )

    @cached_property
    def data(self) -> DeviceMesh:
        """dp_replicate and shard as one axis: all ranks that have different tokens of the same step."""
        p = self.parallel
        return init_device_mesh(
            self.device.type, (p.pp, p.dp * p.cp, p.tp), mesh_dim_names=("pp", "data", "tp")
        )

    @cached_property
    def _sub_meshes(self) -> dict[tuple[str, ...], DeviceMesh]:
        return {}

    def state_mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The ranks along axes of `expert`, where `expert_shard` is among them, or of `dense`.

        Every parameter asks for one, and torch takes milliseconds to make it: each is made once.
        """
        if axes not in self._sub_meshes:
            every = self.expert if "expert_shard" in axes else self.dense
            self._sub_meshes[axes] = every[axes]
        return self._sub_meshes[axes]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along one axis of `sequence`."""
        return self.sequence.get_group(axis)

    def coordinate(self, axis: str) -> int:
        """The coordinate of this rank along one axis of `sequence`."""
        return self.sequence.get_local_rank(axis)

    @property
    def dp_rank(self) -> int:
        """Which of `parallel.dp` parts of a batch this rank reads."""
        return self.coordinate("dp_replicate") * self.parallel.dp_shard + self.coordinate("dp_shard")


def build_mesh(parallel: ParallelSpec, world: World) -> Mesh:
    """Arrange the ranks of the world along the axes; all ranks call it with the same spec. Communicates."""
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
    mesh = Mesh(parallel=p, device=world.device, rank=world.rank, sequence=sequence, dense=dense)
    if p.pp > 1:
        _make_groups(mesh)
    return mesh


def _make_groups(mesh: Mesh) -> None:
    """Make the meshes that only some stages use, on all ranks.

    torch numbers process groups on each rank: where one stage has made a group more, ranks that make the next
    one together have other names for it, and wait for each other in vain.
    """
    _ = mesh.data
    if mesh.parallel.ep > 1:
        _ = mesh.expert
