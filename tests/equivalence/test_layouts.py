"""Every axis, every pair, every triple and the mixes of large runs equal one device."""

import os
from collections.abc import Sequence
from itertools import cycle

import pytest
from tests.support.equivalence import assert_state_bytes, assert_traffic, prove_with_optimizers
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


def each(layouts: list[Layout]) -> pytest.MarkDecorator:
    """One test for each layout."""
    return pytest.mark.parametrize("layout", layouts, ids=[layout.name for layout in layouts])


def each_with_one_optimizer(layouts: list[Layout]) -> pytest.MarkDecorator:
    """One test for each layout; SGD and AdamW alternate, so that every axis is tried with both."""
    cases = list(zip(layouts, cycle(OPTIMIZERS), strict=False))
    return pytest.mark.parametrize(("layout", "optimizer"), cases, ids=[layout.name for layout in layouts])


def prove_layout(
    ranks: RankPool, layout: Layout, group: str, *, optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> None:
    """Three steps with each optimizer; what was sent and held; the worst error goes to the report."""
    run = layout.run()
    has_formula = layout.model in DENSE and layout.parallel.cp_kind != "hierarchical"
    results, worst = prove_with_optimizers(ranks, run, optimizers, records_traffic=has_formula)
    assert_state_bytes(results, run.with_(optim=OPTIMIZERS[optimizers[-1]]))
    if has_formula:
        assert_traffic(results, run)
    add_row(group, layout, worst)


@each_with_one_optimizer(quick_singles())
def test_each_axis(ranks, layout, optimizer):
    prove_layout(ranks, layout, "one axis", optimizers=[optimizer])


@each_with_one_optimizer(quick_pairs())
def test_each_pair_of_axes(ranks, layout, optimizer):
    prove_layout(ranks, layout, "two axes", optimizers=[optimizer])


@each_with_one_optimizer(quick_mixes())
def test_named_mixes(ranks, layout, optimizer):
    prove_layout(ranks, layout, "named mixes", optimizers=[optimizer])


@pytest.mark.soak
@each([*all_singles(), *all_pairs(), *named_mixes()])
def test_every_variant_with_both_optimizers(ranks, layout):
    """With other kinds of models, and every two variants of two axes."""
    prove_layout(ranks, layout, "up to two axes, and named mixes")


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
