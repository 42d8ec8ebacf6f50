"""fp8 across a resume: amax histories and blocks in bf16 are restored, and the recipe may change."""

import json

import pytest
from tests.equivalence.test_fp8 import fp8_run
from tests.support.run_directories import assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.soak import soak

from meshwright.observe.events import events_path, read_events
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import CheckpointSpec, Fp8Spec, ParallelSpec, PrecisionSpec, RunSpec, ScheduleSpec

NUM_STEPS = 4


def _run(fp8: Fp8Spec | None, **changes: object) -> RunSpec:
    return fp8_run(
        precision=PrecisionSpec(compute="bf16", fp8=fp8),
        schedule=ScheduleSpec(num_steps=NUM_STEPS, kind="constant"),
        checkpoint=CheckpointSpec(every_steps=2),
        **changes,
    )


@pytest.mark.parametrize("layout", [{}, soak({"dp_shard": 2, "zero": 3})])
def test_delayed_scales_resume(ranks: RankPool, tmp_path, layout) -> None:
    cast_weights = "per_microbatch" if layout else "per_step"
    fp8 = Fp8Spec(recipe="delayed", bf16_layers_each_end=0, history_steps=3, cast_weights=cast_weights)
    run = _run(fp8, parallel=ParallelSpec(**layout))
    attempt(ranks, run, tmp_path / "whole")
    attempt(ranks, run, tmp_path / "parts", stop_after=2)
    attempt(ranks, run, tmp_path / "parts")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
    histories = read_tensors(last_checkpoint(tmp_path / "parts"))
    named = [name for name in histories if name.startswith("fp8.")]
    assert len(named) == 3 * 4  # q, k, v have one; gate, up have one
    assert all((histories[name] > 0).all() for name in named)


def test_the_recipe_may_change_on_the_way(ranks: RankPool, tmp_path) -> None:
    """A checkpoint is the same with and without fp8."""
    for step, fp8 in enumerate(
        [None, Fp8Spec(bf16_layers_each_end=0), Fp8Spec(recipe="delayed"), None], start=1
    ):
        assert attempt(ranks, _run(fp8), tmp_path, stop_after=1).step == step


def test_blocks_that_fell_back_stay_in_bf16(ranks: RankPool, tmp_path) -> None:
    """No cosine reaches 1, so every block falls back at the first comparison."""
    strict = Fp8Spec(bf16_layers_each_end=1, compare_every_steps=1, min_gradient_cosine=1.0)
    attempt(ranks, _run(strict), tmp_path, stop_after=2)
    manifest = json.loads((last_checkpoint(tmp_path) / "manifest.json").read_text())
    assert manifest["fp8_fallback_layers"] == [1]
    attempt(ranks, _run(strict), tmp_path)
    comparisons = [
        event for event in read_events(events_path(tmp_path, 0)) if event["kind"] == "fp8_comparison"
    ]
    assert [event["step"] for event in comparisons] == [0]
    assert comparisons[0]["fallback_layers"] == [1]
    assert comparisons[0]["cosines"][0] < 1.0
