"""Blends: exact proportions at every prefix, at any index, with sources that end and weights that change."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.data.blend import Blend, Phase, phases_of, plan_period
from meshwright.errors import DataError
from meshwright.spec.data import exact_shares


def largest_error(weights: list[float], count: int) -> Fraction:
    """Of any source at any prefix, by the definition."""
    exact = [Fraction(str(one)) for one in weights]
    blend = Blend([Phase(0, tuple(weights))], [None] * len(weights))
    sources, _ = blend.at(np.arange(count))
    worst = Fraction(0)
    for source, weight in enumerate(exact):
        seen = np.concatenate([[0], np.cumsum(sources == source)])
        share = weight / sum(exact)
        lags = [abs(Fraction(int(seen[n])) - n * share) for n in range(count + 1)]
        worst = max(worst, *lags)
    return worst


@pytest.mark.parametrize(
    "weights",
    [
        [0.7, 0.3],
        [0.001, 0.999],
        [1, 1, 1],
        [0.5, 0.25, 0.125, 0.125],
        [0.37, 0.21, 0.2, 0.12, 0.07, 0.03],
        [5],
    ],
)
def test_error_is_below_one_sample_at_every_prefix(weights: list[float]) -> None:
    assert largest_error(weights, 1200) < 1


@examples(60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_error_is_below_one_sample_for_any_weights(weights: list[int]) -> None:
    assert largest_error([float(one) for one in weights], 2 * sum(exact_shares(weights))) < 1


def test_numbers_count_the_samples_of_each_source() -> None:
    blend = Blend([Phase(0, (0.5, 0.2, 0.3))], [None] * 3)
    sources, numbers = blend.at(np.arange(500))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert blend.drawn(500).tolist() == [250, 100, 150]


def test_no_drift_and_no_replay_far_out() -> None:
    blend = Blend([Phase(0, (0.123456, 0.876544))], [None, None])
    far = 10**9
    started = time.process_time()
    sources, numbers = blend.at(np.array([far, far + 1]))
    assert time.process_time() - started < 1  # a replay takes minutes
    assert blend.drawn(far).tolist() == [123_456_000, 876_544_000]
    assert numbers[0] == blend.drawn(far)[sources[0]]


def test_a_source_that_ends_leaves_the_others_in_proportion() -> None:
    blend = Blend([Phase(0, (0.5, 0.25, 0.25))], [None, 10, None])
    sources, numbers = blend.at(np.arange(400))
    assert (sources == 1).sum() == 10
    assert numbers[sources == 1].tolist() == list(range(10))
    last = int(np.flatnonzero(sources == 1)[-1])
    after = sources[last + 1 :]
    assert abs(int((after == 0).sum()) - len(after) * 2 / 3) < 1
    assert blend.num_samples is None
    assert blend.drawn(400).tolist() == [int((sources == one).sum()) for one in range(3)]


def test_a_blend_of_sources_that_all_end_has_every_sample_once() -> None:
    limits = [17, 5, 40]
    blend = Blend([Phase(0, (0.3, 0.3, 0.4))], limits)
    assert blend.num_samples == sum(limits)
    sources, numbers = blend.at(np.arange(sum(limits)))
    seen = sorted(zip(sources.tolist(), numbers.tolist(), strict=True))
    assert seen == [(source, number) for source, limit in enumerate(limits) for number in range(limit)]


def test_a_curriculum_changes_the_weights_and_goes_on_counting() -> None:
    blend = Blend(phases_of([0.2, 0.8], [(100, [1.0, 0.0]), (200, [0.5, 0.5])]), [None, None])
    sources, numbers = blend.at(np.arange(300))
    assert (sources[:100] == 0).all()
    assert (sources[100:200] == 0).sum() == 50
    assert (sources[200:] == 0).sum() == 20
    assert numbers[sources == 0].tolist() == list(range(170))
    assert blend.drawn(250).tolist() == [int((sources[:250] == one).sum()) for one in (0, 1)]


def test_a_period_with_six_digits_is_planned_in_seconds() -> None:
    started = time.process_time()
    assert len(plan_period([0.333333, 0.666667])) == 10**6
    assert time.process_time() - started < 30  # about 2 s on one core


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [], [0.1234567891, 0.8765432109]])
def test_weights_that_cannot_be_planned_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError):
        plan_period(weights)
    with pytest.raises(DataError, match="does not increase"):
        phases_of([1.0], [(5, [1.0]), (5, [1.0])])
