"""Which layers stand in which pipeline stage, and which stages on which rank."""

from functools import lru_cache
from itertools import pairwise

from meshwright.spec.model import ModelSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.parameters import MATMUL_KINDS, layer_parameters

# Schedules whose second chunk runs back through the ranks, so that rank 0 has the first and the last stage.
V_SCHEDULES = frozenset({"zbv", "dualpipev"})


def stage_layers(model: ModelSpec, num_stages: int) -> list[range]:
    """The layers of each stage, in order; uneven where that makes the slowest stage faster.

    A layer costs its active matmul parameters; the last stage also carries the head, the embedding
    lookup costs nothing. Every stage has at least one layer.
    """
    costs = layer_costs(model)
    bounds = balanced_cuts(tuple(costs), num_stages, last_extra=model.vocab_size * model.width)
    return [range(begin, end) for begin, end in pairwise(bounds)]


def layer_costs(model: ModelSpec) -> list[int]:
    """Active matmul parameters of each layer: proportional to its FLOPs per token."""
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
def balanced_cuts(costs: tuple[int, ...], num_parts: int, *, last_extra: int = 0) -> tuple[int, ...]:
    """Borders 0 = b0 < b1 < ... < bn that make the costliest part as cheap as it can be."""
    low, high = max(costs), sum(costs) + last_extra
    while low < high:
        middle = (low + high) // 2
        if _greedy_cuts(costs, num_parts, last_extra, middle) is None:
            low = middle + 1
        else:
            high = middle
    bounds = _greedy_cuts(costs, num_parts, last_extra, low)
    assert bounds is not None
    return tuple(bounds)


def _greedy_cuts(costs: tuple[int, ...], num_parts: int, last_extra: int, limit: int) -> list[int] | None:
    """Borders with no part over `limit`, filled from the end, where the head is; None if impossible."""
    bounds, end = [len(costs)], len(costs)
    for part in range(num_parts - 1, -1, -1):
        load, begin = (last_extra if part == num_parts - 1 else 0), end
        while begin > part and (begin == end or load + costs[begin - 1] <= limit):
            begin -= 1
            load += costs[begin]
        if load > limit and not (part == num_parts - 1 and end - begin == 1):
            return None
        bounds.append(begin)
        end = begin
    return bounds[::-1] if end == 0 else None


def stages_of_rank(parallel: ParallelSpec, pp_rank: int) -> list[int]:
    """The stages that one pipeline rank holds: every pp-th, or the two ends of a V."""
    if parallel.schedule in V_SCHEDULES:
        return [pp_rank, 2 * parallel.pp - 1 - pp_rank]
    return list(range(pp_rank, parallel.num_stages, parallel.pp))
