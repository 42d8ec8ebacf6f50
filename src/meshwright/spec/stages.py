"""The layers of each pipeline stage, and the stages of each pipeline rank."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwright.spec.model import ModelSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.parameters import MATMUL_KINDS, layer_parameters

# Schedules whose second chunk is placed in reverse order, so that rank 0 has the first and the last stage.
V_SCHEDULES = frozenset({"zbv", "dualpipev"})


def stage_layers(model: ModelSpec, num_stages: int) -> list[range]:
    """The layers of each stage, in order; uneven where that makes the slowest stage faster.

    The cost of a layer is its active matmul parameters; the last stage also has the head, and the embedding
    lookup costs nothing. Every stage has at least one layer.
    """
    costs = layer_costs(model)
    bounds = balanced_bounds(tuple(costs), num_stages, last_extra=model.vocab_size * model.width)
    return [range(begin, end) for begin, end in pairwise(bounds)]


def layer_costs(model: ModelSpec) -> list[int]:
    """Active matmul parameters of each layer, which are proportional to its FLOPs per token."""
    kinds = {
        routed: _layer_cost(model, routed)
        for routed in {model.is_moe_layer(i) for i in range(model.num_layers)}
    }
    return [kinds[model.is_moe_layer(layer)] for layer in range(model.num_layers)]


def _layer_cost(model: ModelSpec, is_routed: bool) -> int:  # noqa: FBT001 - one of two kinds of layer
    layer = model.num_layers - 1 if is_routed else 0
    total = 0
    for parameter in layer_parameters(model, layer):
        if parameter.kind in MATMUL_KINDS:
            share = model.moe.top_k / model.moe.num_experts if model.moe and parameter.kind == "expert" else 1
            total += int(parameter.num_elements * share)
    return total


@lru_cache(maxsize=1024)
def balanced_bounds(costs: tuple[int, ...], num_parts: int, *, last_extra: int = 0) -> tuple[int, ...]:
    """Bounds 0 = b0 < b1 < ... < bn of the partition whose costliest part is cheapest, then most even.

    best[end] is the least (largest part, sum of squares) over partitions of layers 0 .. end so far.
    """
    if len(set(costs)) == 1 and num_parts > 1:
        return _bounds_of_equal_layers(len(costs), costs[0], num_parts, last_extra)
    total = [0, *accumulate(costs)]
    limit = _even_limit(total, num_parts, last_extra)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for part in range(num_parts):
        extra = last_extra if part == num_parts - 1 else 0
        ends = [len(costs)] if part == num_parts - 1 else range(part + 1, len(costs) - num_parts + part + 2)
        best = {
            end: found
            for end in ends
            if (found := min(_extended(best, total, end, extra, limit), default=None))
        }
    return best[len(costs)][2]


def _bounds_of_equal_layers(num_layers: int, cost: int, num_parts: int, last_extra: int) -> tuple[int, ...]:
    """`balanced_bounds` for layers of one cost: only the size of the last part is free."""

    def judged(last: int) -> tuple[int, int, int]:
        size, num_larger = divmod(num_layers - last, num_parts - 1)
        loads = ((size + 1) * cost if num_larger else size * cost, last * cost + last_extra)
        squares = num_larger * ((size + 1) * cost) ** 2 + (num_parts - 1 - num_larger) * (size * cost) ** 2
        return max(loads), squares + loads[1] ** 2, -last

    last = min(range(1, num_layers - num_parts + 2), key=judged)
    size, num_larger = divmod(num_layers - last, num_parts - 1)
    sizes = [size] * (num_parts - 1 - num_larger) + [size + 1] * num_larger + [last]
    return (0, *accumulate(sizes))


def _extended(
    best: dict[int, tuple[int, int, tuple[int, ...]]], total: list[int], end: int, extra: int, limit: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for begin, (largest, squares, bounds) in best.items():
        load = total[end] - total[begin] + extra
        if begin < end and load <= limit:
            yield max(largest, load), squares + load * load, (*bounds, end)


def _even_limit(total: list[int], num_parts: int, last_extra: int) -> int:
    """The cost of the costliest part with equal numbers of layers: an upper bound for the best partition."""
    num_layers = len(total) - 1
    bounds = [part * num_layers // num_parts for part in range(num_parts + 1)]
    loads = [total[end] - total[begin] for begin, end in pairwise(bounds)]
    return max(*loads, loads[-1] + last_extra)


def stages_of_rank(parallel: ParallelSpec, pp_rank: int) -> list[int]:
    """The stages of one pipeline rank: every pp-th stage, or the two of a V-shaped schedule."""
    if parallel.schedule in V_SCHEDULES:
        return [pp_rank, 2 * parallel.pp - 1 - pp_rank]
    return list(range(pp_rank, parallel.num_stages, parallel.pp))
