"""Layers dealt out to pipeline stages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.spec import ParallelSpec
from meshwright.spec.families import family
from meshwright.spec.stages import balanced_bounds, layer_costs, stage_layers, stages_of_rank


def _loads(costs, bounds, last_extra):
    loads = [sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return [*loads[:-1], loads[-1] + last_extra]


@examples(60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 20))
def test_no_cut_has_a_cheaper_costliest_part(costs, num_parts, last_extra):
    num_parts = min(num_parts, len(costs))
    bounds = balanced_bounds(tuple(costs), num_parts, last_extra=last_extra)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and list(bounds) == sorted(set(bounds))
    inner = itertools.combinations(range(1, len(costs)), num_parts - 1)
    best = min(max(_loads(costs, (0, *cut, len(costs)), last_extra)) for cut in inner)
    assert max(_loads(costs, bounds, last_extra)) == best


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.integers(0, 40))
def test_layers_of_one_cost_are_cut_as_well_as_any(num_layers, cost, num_parts, last_extra):
    num_parts = min(num_parts, num_layers)
    costs = (cost,) * num_layers
    cuts = [(0, *cut, num_layers) for cut in itertools.combinations(range(1, num_layers), num_parts - 1)]

    def judged(cut):
        loads = _loads(costs, cut, last_extra)
        return max(loads), sum(load * load for load in loads), cut

    assert balanced_bounds(costs, num_parts, last_extra=last_extra) == min(cuts, key=judged)


def test_the_stage_of_the_head_has_fewer_layers():
    assert [len(layers) for layers in stage_layers(family("llama-3.1-8b"), 4)] == [8, 9, 9, 6]
    assert [len(layers) for layers in stage_layers(family("llama-3.1-8b"), 8)] == [4, 4, 4, 4, 4, 5, 5, 2]


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3", "gpt2-124m"])
def test_every_layer_stands_in_one_stage(name):
    model = family(name)
    stages = stage_layers(model, 6)
    assert [layer for layers in stages for layer in layers] == list(range(model.num_layers))
    assert len(layer_costs(model)) == model.num_layers


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "expected"),
    [
        ("1f1b", 1, [[0], [1], [2]]),
        ("interleaved_1f1b", 2, [[0, 3], [1, 4], [2, 5]]),
        ("zbv", 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_of_a_rank(schedule, virtual_stages, expected):
    parallel = ParallelSpec(pp=3, schedule=schedule, virtual_stages=virtual_stages)
    assert [stages_of_rank(parallel, rank) for rank in range(3)] == expected
