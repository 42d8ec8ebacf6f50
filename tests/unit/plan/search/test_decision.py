"""The decision is what an expert would choose in clear cases, passes the rules, and becomes a run file."""

import numpy as np
import pytest
from tests.support.plans import asked, planned, small_plan

from meshwright.plan.explain.reasons import explain
from meshwright.plan.make_plan import make_plan
from meshwright.plan.predict import predict_run
from meshwright.plan.search.decision import pareto_rows, ranking
from meshwright.plan.search.question import Priced
from meshwright.plan.workload.layouts import layouts
from meshwright.spec.check import check
from meshwright.spec.parallel import ParallelSpec


def test_what_fits_on_one_device_stays_unsharded() -> None:
    best = planned("gpt3-125m", "a100:1", seq=2048, batch_tokens=2**19).best
    assert best.num_ranks == 1
    assert best.run.parallel == ParallelSpec()


def test_ddp_while_the_full_state_fits() -> None:
    best = small_plan().best
    assert best.run.parallel == ParallelSpec(dp_replicate=8)
    assert best.run.memory.recompute == "none"


def test_state_too_large_for_one_device_is_sharded_without_tp_or_pp() -> None:
    parallel = planned("llama-3.1-8b", "h100:8x8").best.run.parallel
    assert parallel.zero == 3
    assert (parallel.tp, parallel.pp, parallel.cp) == (1, 1, 1)


def test_large_models_use_tp_inside_a_node() -> None:
    """Few tokens per device do not overlap the gathers of layers; at 8192 tokens FSDP alone is as fast."""
    here = ("memory.offload=[]", "data.documents=joined")
    parallel = planned("llama-3.1-70b", "dgx-h100:8", *here, seq=4096, batch_tokens=2**18).best.run.parallel
    assert parallel.zero == 3
    assert 1 < parallel.tp <= 8


def test_hundreds_of_billions_use_every_axis() -> None:
    """Meta published tp 8, pp 16, dp 128 for this model on 16,384 H100; half the stages are as good here."""
    parallel = planned("llama-3.1-405b", "h100:8x2048", batch_tokens=2**24).best.run.parallel
    assert parallel.tp == 8
    assert (parallel.pp, parallel.dp) in ((16, 128), (8, 256))
    # Sharding the moments costs no more than reducing full gradients, and frees what fewer stages need.
    assert parallel.zero >= 1


def test_tensor_parallel_stays_inside_the_node() -> None:
    fitting = planned("llama-3.1-70b", "leonardo:32").result.fitting
    assert fitting.layouts.tp.max() <= 4


@pytest.mark.parametrize(
    ("model", "on"), [("gpt3-1.3b", "a100:8"), ("llama-3.1-8b", "h100:8x8"), ("mixtral-8x7b", "dgx-h100:4")]
)
def test_all_that_is_shown_passes_the_rules_and_fits(model: str, on: str) -> None:
    plan = planned(model, on, seq=2048, batch_tokens=2**20)
    for candidate in (plan.best, *plan.top):
        assert check(candidate.run) == []
        assert candidate.fits
        assert sum(candidate.seconds_items.values()) == pytest.approx(candidate.step_seconds)
        low, high = candidate.interval_seconds
        assert low < candidate.step_seconds < high
        assert 0.05 < candidate.mfu < 0.9


def test_pareto_set_has_no_dominated_member() -> None:
    at = layouts(dp_replicate=[1, 1, 2, 2])
    priced = Priced(at, np.array([10.0, 9.0, 8.0, 12.0]), np.array([2.0, 3.0, 1.0, 1.5]))
    assert pareto_rows(priced) == [2, 0, 1]


def test_the_simplest_of_equally_fast_layouts_is_chosen() -> None:
    at = layouts(dp_replicate=[8, 1, 1], dp_shard=[1, 8, 8], zero=[0, 1, 3])
    priced = Priced(at, np.array([3.0, 2.0, 1.0]), np.array([1.015, 1.000, 1.03]))
    assert ranking(priced, "speed").tolist() == [0, 1, 2]
    assert ranking(priced, "memory").tolist() == [2, 1, 0]


def test_objective_cost_uses_fewer_device_hours() -> None:
    fast = planned("llama-3.1-70b", "dgx-h100:16").best
    cheap = make_plan(asked("llama-3.1-70b", "dgx-h100:16", objective="cost").question).best
    assert cheap.device_hours(10**12) <= fast.device_hours(10**12) * 1.001


def test_every_axis_has_its_alternative_even_when_each_round_finds_a_better_layout() -> None:
    """By memory, neighbours of this plan need less in every round, so that the rounds run out."""
    plan = make_plan(asked("mixtral-8x7b", "dgx-h200:2", objective="memory").question)
    used = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(plan.best.run.parallel, axis) > 1]
    assert set(plan.without) == set(used) != set()
    assert explain(plan)


def test_predict_says_the_same_about_the_run_that_was_planned() -> None:
    best = planned("llama-3.1-70b", "dgx-h100:8", "pp=2").best
    same = predict_run(best.run, best.question.cluster)
    assert same.step_seconds == pytest.approx(best.step_seconds, rel=1e-12)
    assert same.peak_stage.device_bytes == pytest.approx(best.device_bytes, rel=1e-12)
    assert same.mfu == pytest.approx(best.mfu, rel=1e-12)
