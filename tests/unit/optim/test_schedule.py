"""The learning rate of every shape as a table."""

import math
from itertools import pairwise

import pytest

from meshwright.optim.schedule import batch_factor, learning_rate, peak_rate, rate_ratio
from meshwright.spec import LrScalingSpec, OptimSpec, ScheduleSpec

TABLES = {
    "constant": (ScheduleSpec(num_steps=4, kind="constant", warmup_steps=2), [0.5, 1.0, 1.0, 1.0]),
    "linear": (
        ScheduleSpec(num_steps=6, kind="linear", warmup_steps=1, min_lr_ratio=0.2),
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2],
    ),
    "cosine": (
        ScheduleSpec(num_steps=5, kind="cosine", min_lr_ratio=0.0),
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0],
    ),
    "wsd": (
        ScheduleSpec(num_steps=7, kind="wsd", warmup_steps=2, decay_steps=3, min_lr_ratio=0.1),
        [0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1],
    ),
    "inverse_sqrt": (
        ScheduleSpec(num_steps=9, kind="inverse_sqrt", warmup_steps=4),
        [0.25, 0.5, 0.75, 1.0, *(math.sqrt(4 / n) for n in (5, 6, 7, 8, 9))],
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_table(kind):
    schedule, expected = TABLES[kind]
    assert [rate_ratio(schedule, step) for step in range(schedule.num_steps)] == pytest.approx(expected)


@pytest.mark.parametrize("kind", TABLES)
def test_warms_up_from_above_zero_and_never_exceeds_the_peak(kind):
    schedule = TABLES[kind][0].with_(num_steps=100, warmup_steps=10)
    ratios = [rate_ratio(schedule, step) for step in range(100)]
    assert 0 < ratios[0] < ratios[9] == 1.0
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert all(later <= earlier for earlier, later in pairwise(ratios[9:]))


def test_the_last_step_is_at_the_final_ratio():
    for kind in ("cosine", "linear", "wsd"):
        schedule = ScheduleSpec(num_steps=50, kind=kind, warmup_steps=5, decay_steps=10, min_lr_ratio=0.3)
        assert rate_ratio(schedule, 49) == pytest.approx(0.3)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_a_larger_batch_takes_larger_steps(rule, factor):
    scaling = LrScalingSpec(rule=rule, reference_batch_tokens=1000)
    assert batch_factor(scaling, 4000) == pytest.approx(factor)
    assert batch_factor(scaling, 250) == pytest.approx(1 / factor)
    optim = OptimSpec(lr=0.1, lr_scaling=scaling)
    assert peak_rate(optim, batch_tokens=4000) == pytest.approx(0.1 * factor)


def test_without_a_rule_the_batch_does_not_matter():
    schedule = ScheduleSpec(num_steps=10, kind="constant", warmup_steps=2)
    rates = {learning_rate(OptimSpec(lr=0.1), schedule, 0, batch_tokens=n) for n in (1, 10**9)}
    assert rates == {0.05}
