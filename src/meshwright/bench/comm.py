"""Collectives by message size and group size: seconds, and the bandwidth of a ring on each link.

Every rank calls this, with the world joined. The time of a call is that of the slowest rank. The message is
the full tensor: the input of all-reduce, reduce-scatter and all-to-all, the output of all-gather, and what
one rank sends to the next. The bus bandwidth is that of the NCCL tests: what each rank sends in a ring,
2 (n-1)/n of the message for an all-reduce, (n-1)/n for the others, and all of it from rank to rank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.bench.timing import synchronize
from meshwright.hardware.profile import RING_SHARE
from meshwright.mesh import Mesh, World
from meshwright.ops.collectives import all_gather_single, reduce_scatter_single
from meshwright.spec import MESH_ORDER

Row = dict[str, Any]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive")
SIZES = {"cuda": tuple(1 << power for power in range(12, 31, 3)), "cpu": (1 << 12, 1 << 16, 1 << 20)}
_WARMUP_CALLS, _FEWEST_CALLS, _MOST_CALLS = 3, 5, 100


def comm_rows(
    world: World, *, seconds: float, sizes: Sequence[int] = (), ranks_per_node: int | None = None
) -> Iterator[Row]:
    """Rows for groups of the first 2, 4, ... up to all ranks; ranks outside a group wait for it."""
    local = ranks_per_node or world.num_ranks
    for num_ranks in group_sizes(world.num_ranks, local):
        ranks = list(range(num_ranks))
        group = dist.new_group(ranks)
        for kind in KINDS:
            for size in sizes or SIZES[world.device.type]:
                row = None
                if world.rank < num_ranks:
                    row = _row(kind, ranks, size, group, world, seconds)
                dist.barrier()
                if row is not None:
                    yield {**row, "nodes": -(-num_ranks // local)}


def axis_rows(
    mesh: Mesh, world: World, *, seconds: float, sizes: Sequence[int] = (), ranks_per_node: int | None = None
) -> Iterator[Row]:
    """Rows for each axis of a mesh: all groups of an axis communicate at once, as they do in a step."""
    local = ranks_per_node or world.num_ranks
    for axis in (name for name in MESH_ORDER if getattr(mesh.parallel, name) > 1):
        group = mesh.group(axis)
        ranks = dist.get_process_group_ranks(group)
        for kind in KINDS:
            for size in sizes or SIZES[world.device.type]:
                row = _row(kind, ranks, size, group, world, seconds)
                dist.barrier()
                yield {**row, "axis": axis, "nodes": len({rank // local for rank in ranks})}


def group_sizes(num_ranks: int, ranks_per_node: int) -> list[int]:
    """Powers of two, all ranks of 1, 2, 4, ... nodes, and all ranks."""
    powers = [1 << power for power in range(20)]
    full_nodes = [ranks_per_node * nodes for nodes in powers]
    return sorted({size for size in (*powers[1:], *full_nodes) if 1 < size < num_ranks} | {num_ranks})


def _row(kind: str, ranks: list[int], size: int, group: Any, world: World, seconds: float) -> Row:
    num_ranks = len(ranks)
    row: Row = {"kind": kind, "ranks": num_ranks, "bytes": size}
    try:
        call = _call(kind, ranks, size, group, world)
        taken = _slowest_seconds(call, group, world.device, seconds)
    except RuntimeError as error:  # the backend lacks this collective
        return {**row, "error": str(error).splitlines()[0][:100]}
    moved = RING_SHARE.get(kind, 1.0) * size * ((num_ranks - 1) / num_ranks if kind in RING_SHARE else 1.0)
    return row | {"seconds": taken, "bus_gigabytes_per_second": moved / taken / 1e9}


def _call(kind: str, ranks: list[int], size: int, group: Any, world: World) -> Callable[[], object]:
    num_ranks = len(ranks)
    count = max(num_ranks, size // 4 // num_ranks * num_ranks)
    full = torch.randn(count, device=world.device)
    shard = torch.randn(count // num_ranks, device=world.device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(full, group=group)
        case "all_gather":
            return lambda: all_gather_single(full, shard, group=group)
        case "reduce_scatter":
            return lambda: reduce_scatter_single(shard, full, group=group)
        case "all_to_all":
            other = torch.empty_like(full)
            return lambda: dist.all_to_all_single(other, full, group=group)
        case _:
            received, here = torch.empty_like(full), ranks.index(world.rank)
            following, previous = ranks[(here + 1) % num_ranks], ranks[here - 1]
            return lambda: _send_on(full, received, following, previous, group)


def _send_on(tensor: torch.Tensor, received: torch.Tensor, to: int, source: int, group: Any) -> None:
    """Each rank sends to the next rank and receives from the previous one."""
    sends = dist.P2POp(dist.isend, tensor, to, group)
    receives = dist.P2POp(dist.irecv, received, source, group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def _slowest_seconds(call: Callable[[], object], group: Any, device: torch.device, seconds: float) -> float:
    """Mean seconds of one call on the slowest rank; all ranks make the same number of calls."""
    once = max(_mean_seconds(call, group, device, _WARMUP_CALLS) for _ in range(2))
    wanted = torch.tensor([seconds / max(once, 1e-7)], device=device, dtype=torch.float64)
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN, group=group)
    num_calls = max(_FEWEST_CALLS, min(_MOST_CALLS, int(wanted)))
    taken = torch.tensor([_mean_seconds(call, group, device, num_calls)], device=device, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return float(taken)


def _mean_seconds(call: Callable[[], object], group: Any, device: torch.device, num_calls: int) -> float:
    dist.barrier(group=group)
    synchronize(device)
    started_at = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(device)
    return (time.perf_counter() - started_at) / num_calls
