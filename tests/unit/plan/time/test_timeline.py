"""The simulated bubble is the published one, and a long run is extended exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.plan.time.timeline import StageSeconds, Timeline, finish_seconds, simulate
from meshwright.plan.workload.schedules import SCHEDULES, PipelineShape, problem
from meshwright.spec.parallel import Schedule


def timeline(schedule: Schedule, shape: PipelineShape, **seconds: float) -> Timeline:
    return simulate(schedule, shape, StageSeconds.uniform(shape.num_stages, **seconds))


THIRDS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_bubble_of_one_stage_per_rank_is_p_minus_1_over_m(pp: int, rounds: int) -> None:
    m = pp * rounds
    for schedule in ("gpipe", "1f1b"):
        overhead = timeline(schedule, PipelineShape(pp, 1, m), **THIRDS).bubble_overhead
        assert overhead == pytest.approx((pp - 1) / m, rel=1e-12)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
def test_virtual_stages_divide_the_bubble(schedule: Schedule, pp: int, v: int) -> None:
    m = 4 * pp
    overhead = timeline(schedule, PipelineShape(pp, v, m), **THIRDS).bubble_overhead
    assert overhead == pytest.approx((pp - 1) / (m * v), rel=1e-12)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_splitting_the_backward_takes_a_third_of_the_bubble(pp: int) -> None:
    """ZB1P: (p-1)(F + B - 2W), where B is the full backward."""
    shape = PipelineShape(pp, 1, 4 * pp)
    result = timeline("interleaved_zero_bubble", shape, forward=1.0, backward_input=1.2, backward_weight=0.8)
    bubble = result.finish_seconds - max(result.busy_seconds)
    assert bubble == pytest.approx((pp - 1) * (1.0 + 2.0 - 2 * 0.8), rel=1e-12)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_v_schedules_leave_the_least_bubble(pp: int) -> None:
    shape = PipelineShape(pp, 2, 4 * pp)
    zbv = timeline("zbv", shape, **THIRDS)
    # The last stage waits pp - 1 hops for its first forward; after that nobody waits for anybody.
    assert zbv.finish_seconds - max(zbv.busy_seconds) == pytest.approx(pp - 1, rel=1e-12)
    dual = timeline("dualpipev", shape, **THIRDS)
    assert dual.finish_seconds - max(dual.busy_seconds) <= (pp - 1) * (3 + 2 - 3) + 1e-9
    interleaved = timeline("interleaved_1f1b", shape, **THIRDS)
    assert zbv.finish_seconds < dual.finish_seconds + 1e-9 < interleaved.finish_seconds + 1e-9


def test_a_slow_stage_sets_the_pace() -> None:
    shape = PipelineShape(4, 1, 64)
    forward = np.array([1.0, 1.0, 1.0, 2.0])
    result = simulate("1f1b", shape, StageSeconds(forward, forward, forward))
    assert max(result.busy_seconds) == 64 * 6.0
    assert result.finish_seconds == pytest.approx(64 * 6.0 + 3 * 3.0)


def test_hops_delay_the_receiver() -> None:
    """Two ranks, one micro-batch: forward and backward are two hops."""
    result = timeline("gpipe", PipelineShape(2, 1, 1), **THIRDS, hop=0.25)
    assert result.finish_seconds == pytest.approx(6.0 + 2 * 0.25)


seconds = st.floats(0.1, 3.0)


@examples(60)
@given(
    schedule=st.sampled_from(SCHEDULES),
    pp=st.integers(2, 6),
    v=st.integers(1, 4),
    m=st.integers(1, 70),
    times=st.tuples(seconds, seconds, seconds, st.floats(0.0, 0.1)),
)
def test_extension_equals_simulation(
    schedule: Schedule, pp: int, v: int, m: int, times: tuple[float, float, float, float]
) -> None:
    shape = PipelineShape(pp, v, m)
    if problem(schedule, shape):
        return
    forward, backward_input, backward_weight, hop = times
    stages = StageSeconds.uniform(
        shape.num_stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        hop=hop,
    )
    exact = simulate(schedule, shape, stages).finish_seconds
    # Rare mixtures of times settle later than the short run lasts; that costs under 2%.
    assert float(finish_seconds(schedule, shape, stages)) == pytest.approx(exact, rel=0.02)


def test_layouts_are_priced_together() -> None:
    shape = PipelineShape(4, 2, 64)
    forward = np.outer(np.ones(shape.num_stages), [1.0, 2.0, 3.0])
    together = finish_seconds("interleaved_1f1b", shape, StageSeconds(forward, forward, forward, np.zeros(3)))
    alone = timeline("interleaved_1f1b", shape, **THIRDS).finish_seconds
    assert together == pytest.approx(np.array([1.0, 2.0, 3.0]) * alone)
