"""Collectives by message size and group size: seconds, and the bandwidth of a ring on each link.

Every rank calls this, with the world joined. The time of a call is that of the slowest rank. The message is
the full tensor: the input of all-reduce, reduce-scatter and all-to-all, the output of all-gather, and what
one rank sends to the next.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwright.bench.timing import synchronize
from meshwright.hardware.profile import RING_SHARE
from meshwright.mesh import World
from meshwright.ops.collectives import all_gather_single, reduce_scatter_single

Row = dict[str, Any]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive")
SIZES = {"cuda": tuple(1 << power for power in range(12, 31, 3)), "cpu": (1 << 12, 1 << 16, 1 << 20)}
_WARMUP_CALLS, _FEWEST_CALLS, _MOST_CALLS = 3, 5, 100


def comm_rows(world: World, *, seconds: float, sizes: tuple[int, ...] = ()) -> Iterator[Row]:
    """Rows for groups of the first 2, 4, ... up to all ranks; ranks outside a group wait for it."""
    local = max(1, _ranks_per_node(world))
    for num_ranks in group_sizes(world.num_ranks):
        group = dist.new_group(list(range(num_ranks)))
        for kind in KINDS:
            for size in sizes or SIZES[world.device.type]:
                row = None
                if world.rank < num_ranks:
                    row = _row(kind, num_ranks, size, group, world, seconds)
                dist.barrier()
                if row is not None:
                    yield {**row, "nodes": -(-num_ranks // local)}


def group_sizes(num_ranks: int) -> list[int]:
    """The powers of two below the number of ranks, and the number itself."""
    smaller = [1 << power for power in range(1, 20) if 1 << power < num_ranks]
    return [*smaller, num_ranks]


def _ranks_per_node(world: World) -> int:
    return torch.cuda.device_count() if world.device.type == "cuda" else world.num_ranks


def _row(kind: str, num_ranks: int, size: int, group: Any, world: World, seconds: float) -> Row:
    row: Row = {"kind": kind, "ranks": num_ranks, "bytes": size}
    try:
        call = _call(kind, num_ranks, size, group, world)
        taken = _slowest_seconds(call, group, world.device, seconds)
    except RuntimeError as error:  # the backend lacks this collective
        return {**row, "error": str(error).splitlines()[0][:100]}
    moved = RING_SHARE.get(kind, 1.0) * size * ((num_ranks - 1) / num_ranks if kind in RING_SHARE else 1.0)
    return row | {"seconds": taken, "link_gigabytes_per_second": moved / taken / 1e9}


def _call(kind: str, num_ranks: int, size: int, group: Any, world: World) -> Callable[[], object]:
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
            return lambda: _send_to_next(full, group, world, num_ranks)


def _send_to_next(tensor: torch.Tensor, group: Any, world: World, num_ranks: int) -> None:
    """Each rank sends to the next rank and receives from the previous one."""
    received = torch.empty_like(tensor)
    sends = dist.P2POp(dist.isend, tensor, (world.rank + 1) % num_ranks, group)
    receives = dist.P2POp(dist.irecv, received, (world.rank - 1) % num_ranks, group)
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
