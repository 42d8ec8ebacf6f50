"""Buffers of gradients: what the reductions hold is what a loop over the buffers finds."""

import numpy as np
import pytest

from meshwright.plan.memory.buckets import Flats, Stage, buckets_of
from meshwright.spec.families import family
from meshwright.spec.parameters import parameters


def fullest_by_loop(flats: Flats, shards: float, first: int) -> float:
    """Launch the buffers from the first one on, one after the other, and note the most that is held."""
    waiting, sent, fullest = float(flats.whole[first:].sum()), 0.0, 0.0
    for index in range(first, len(flats.whole)):
        whole, padded, copies = (float(values[index]) for values in (flats.whole, flats.padded, flats.copies))
        waiting -= whole
        rows = flats.expert_rows if flats.is_experts[index] else shards
        shard = padded / rows if shards else 0.0
        launching = max(whole, shard) + copies + padded if copies else whole + padded + shard
        fullest = max(fullest, waiting + launching + sent)
        sent += shard if shards else padded
    return fullest


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ("llama-3.2-1b", Stage(16, has_embedding=True, has_head=True, is_cut=False)),
        ("llama-3.1-8b", Stage(7, has_embedding=False, has_head=True, is_cut=True)),
        ("mixtral-8x7b", Stage(8, has_embedding=True, has_head=False, is_cut=False, ep=2, expert_rows=3)),
        ("deepseek-v2-lite", Stage(27, True, True, True, tp=2, ep=4, expert_rows=3)),
    ],
)
@pytest.mark.parametrize("shards", [0.0, 8.0])
def test_the_fullest_reduction_is_that_of_a_loop(model: str, stage: Stage, shards: float) -> None:
    found = buckets_of(family(model))
    flats = found.flats(stage)
    # The order of a sum differs.
    whole, tail = found.fullest_reductions(stage, shards)
    assert whole == pytest.approx(fullest_by_loop(flats, shards, 0), rel=1e-12)
    assert tail == pytest.approx(fullest_by_loop(flats, shards, flats.last_index), rel=1e-12)


def test_the_buffers_of_the_full_model_have_each_of_its_parameters_once() -> None:
    for name in ("llama-3.1-8b", "deepseek-v2-lite"):
        model = family(name)
        flats = buckets_of(model).flats(Stage(model.num_layers, True, True, is_cut=False))
        every = [one.num_elements for one in parameters(model)]
        assert np.sum(flats.whole) == sum(every)
        assert flats.largest_parameter == max(every)
