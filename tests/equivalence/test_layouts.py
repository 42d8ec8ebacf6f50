"""Every axis, every pair, every triple and the mixes of large runs equal one device."""

import os

import pytest
from tests.support.equivalence import assert_state_bytes, assert_traffic, prove_with_every_optimizer
from tests.support.equivalence_report import add_row
from tests.support.layouts import (
    DENSE,
    Layout,
    all_axes_on_16,
    all_pairs,
    all_singles,
    all_triples,
    named_mixes,
    quick_mixes,
    quick_pairs,
    quick_singles,
    random_layouts,
)
from tests.support.runs import OPTIMIZERS

from meshwright.rehearse.rank_pool import RankPool

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
NUM_RANDOM = 40


def each(layouts: list[Layout], quick: list[Layout] | None = None) -> pytest.MarkDecorator:
    """One test for each layout; those that are not among `quick` repeat a proof with another kind of model or
    another variant of an axis, and run in `make soak`."""
    soak = [layout for layout in layouts if quick is not None and layout not in quick]
    marked = [pytest.param(layout, marks=pytest.mark.soak if layout in soak else ()) for layout in layouts]
    return pytest.mark.parametrize("layout", marked, ids=[layout.name for layout in layouts])


def prove_layout(ranks: RankPool, layout: Layout, group: str) -> None:
    """SGD and AdamW, three steps; what was sent and held; the worst error goes to the report."""
    run = layout.run()
    has_formula = layout.model in DENSE and layout.parallel.cp_kind != "hierarchical"
    results, worst = prove_with_every_optimizer(ranks, run, records_traffic=has_formula)
    assert_state_bytes(results, run.with_(optim=OPTIMIZERS["adamw"]))
    if has_formula:
        assert_traffic(results, run)
    add_row(group, layout, worst)


@each(all_singles(), quick_singles())
def test_each_axis(ranks, layout):
    prove_layout(ranks, layout, "one axis")


@each(all_pairs(), quick_pairs())
def test_each_pair_of_axes(ranks, layout):
    prove_layout(ranks, layout, "two axes")


@each(named_mixes(), quick_mixes())
def test_named_mixes(ranks, layout):
    prove_layout(ranks, layout, "named mixes")


@pytest.mark.soak
@each(all_triples())
def test_each_triple_of_axes(ranks, layout):
    prove_layout(ranks, layout, "three axes")


@pytest.mark.soak
@each(all_axes_on_16())
def test_all_axes_at_once(layout):
    pool = RankPool(max_ranks=16)
    try:
        prove_layout(pool, layout, "sixteen ranks")
    finally:
        pool.close()


@pytest.mark.soak
@each(random_layouts(SEED, NUM_RANDOM))
def test_random_layouts(ranks, layout):
    """Another seed: MESHWRIGHT_TEST_SEED=2 make soak."""
    print(f"seed {SEED}: {layout.parallel!r}")
    prove_layout(ranks, layout, f"random, seed {SEED}")
