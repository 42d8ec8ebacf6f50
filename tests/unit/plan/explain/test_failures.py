"""The checkpoint interval for a rate of failures, against a search and the simulated supervisor."""

import math

import pytest

from meshwright.plan.explain.failures import (
    DEVICE_HOURS_PER_FAILURE,
    MAX_LOST_GOODPUT,
    save_interval,
    usual_interval,
)
from meshwright.resilience.simulation import SimulatedRun, simulate
from meshwright.spec.resilience import RestartSpec


def test_the_published_rate_is_one_failure_in_three_hours_of_16384_gpus():
    assert pytest.approx(3.093, abs=0.001) == DEVICE_HOURS_PER_FAILURE / 16_384


@pytest.mark.parametrize("stall", [0.1, 1.0, 30.0])
def test_no_other_interval_has_a_better_goodput(stall):
    found = save_interval(failure_seconds=11_135.0, stall_seconds=stall, restart_seconds=120.0)

    def goodput(seconds: float) -> float:
        mean = 11_135.0
        return seconds / (mean * math.exp(120.0 / mean) * math.expm1((seconds + stall) / mean))

    assert found.goodput == pytest.approx(goodput(found.seconds))
    best = max(goodput(found.seconds * factor) for factor in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0))
    assert found.goodput >= best
    assert found.seconds == pytest.approx(math.sqrt(2 * stall * 11_135.0), rel=0.05), "Young's first order"


def test_a_stall_longer_than_the_time_between_failures():
    assert save_interval(failure_seconds=10.0, stall_seconds=30.0).seconds == 10.0


@pytest.mark.parametrize("failure_seconds", [3_000.0, 11_135.0, 181_440.0, 2.3e7])
def test_checkpoints_are_ten_minutes_apart_where_that_costs_little(failure_seconds):
    best = save_interval(failure_seconds=failure_seconds, stall_seconds=0.07)
    found = usual_interval(best)
    assert found.seconds >= best.seconds
    assert best.goodput - found.goodput <= MAX_LOST_GOODPUT
    assert found.seconds == best.seconds or found.seconds <= 600.0
    assert usual_interval(best, write_seconds=900.0).seconds >= 900.0, "a write ends before the next begins"


def test_the_simulated_supervisor_reaches_the_expected_goodput():
    expected = save_interval(failure_seconds=11_135.0, stall_seconds=1.0, restart_seconds=120.0)
    run = SimulatedRun(
        num_steps=54 * 86_400,
        step_seconds=1.0,
        checkpoint_every_steps=round(expected.seconds),
        checkpoint_stall_seconds=1.0,
        mean_seconds_between_failures=11_135.0,
        detect_seconds=0.0,
        hang_seconds=0.0,
        hang_share=0.0,
        restart_seconds=120.0,
        policy=RestartSpec(max_restarts=2000),
    )
    assert simulate(run, seed=1).goodput == pytest.approx(expected.goodput, abs=0.003)
