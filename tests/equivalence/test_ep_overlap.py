"""Exchanges of expert parallelism that overlap with compute: the same values, and launched ahead of it."""

import pytest
from tests.support.equivalence import assert_same_training, prove, run_case
from tests.support.layouts import Layout
from tests.support.oracle import reference
from tests.support.runs import tiny_run

from meshwright.spec import MemorySpec, ParallelSpec


def _layout(overlap: str, model: str, **parallel: object) -> Layout:
    sharded = {"dp_shard": 2, "zero": 1} | parallel
    return Layout(ParallelSpec.model_validate({"ep": 2, "ep_overlap": overlap} | sharded), model)


LAYOUTS = [
    _layout("shared", "moe_shared"),
    _layout("halves", "moe_shared", zero=2),
    _layout("shared", "moe_shared", zero=3),
    _layout("halves", "moe", zero=3),
    _layout("halves", "moe_capacity"),
    _layout("shared", "moe_shared", tp=2),
    _layout("halves", "moe", tp=2, etp=2),
    _layout("shared", "moe_shared", tp=2, etp=2),
    _layout("shared", "moe_shared", pp=2),
    _layout("halves", "moe", pp=2, schedule="zbv", virtual_stages=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def test_every_layout_trains_the_same(ranks, layout):
    prove(ranks, layout.run())


@pytest.mark.parametrize("recompute", ("full", "selective"))
@pytest.mark.parametrize("overlap", ("shared", "halves"))
def test_recompute_exchanges_again(ranks, overlap, recompute):
    run = _layout(overlap, "moe_shared").run()
    prove(ranks, run.with_(memory=MemorySpec(recompute=recompute)))
