"""Prediction of a run file: memory, time and MFU of its layout."""

import pytest

from meshwright.errors import SpecError
from meshwright.hardware import parse_cluster
from meshwright.plan.predict import layout_of, predict_run
from meshwright.plan.search.candidate import candidate_of, with_layout
from meshwright.spec import DataSpec, ParallelSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.families import family
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.text import load_run


def _run(**parallel: int) -> RunSpec:
    ranks = ParallelSpec(**parallel)
    return RunSpec(
        model=family("llama-3.1-8b"),
        parallel=ranks,
        precision=PrecisionSpec(compute="bf16"),
        schedule=ScheduleSpec(num_steps=10),
        data=DataSpec(synthetic=SyntheticSpec(), sequence_length=4096, batch_sequences=64),
    )


def test_a_run_has_memory_time_and_mfu() -> None:
    found = predict_run(_run(tp=2, dp_shard=4, zero=3), parse_cluster("h100:8"))
    assert found.low_seconds < found.step_seconds < found.high_seconds
    assert found.step_seconds == pytest.approx(sum(found.seconds_by_item.values()))
    assert found.tokens_per_second_per_device * 8 * found.step_seconds == pytest.approx(64 * 4096)
    assert 0.2 < found.mfu < 0.65
    assert [stage.stage for stage in found.stages] == ["every"]
    assert found.peak_stage.allocated_bytes == pytest.approx(sum(found.peak_stage.items.values()))


def test_a_pipeline_has_three_kinds_of_ranks() -> None:
    found = predict_run(_run(pp=4, tp=2), parse_cluster("h100:8"))
    assert [stage.stage for stage in found.stages] == ["first", "middle", "last"]
    assert found.seconds_by_item["bubble"] > 0


def test_the_cluster_must_have_the_runs_ranks() -> None:
    with pytest.raises(SpecError) as caught:
        predict_run(_run(tp=2, dp_shard=4, zero=1), parse_cluster("h100:16"))
    assert "8 ranks" in caught.value.fact
    assert "h100:8" in caught.value.hint


def test_memory_does_not_depend_on_the_cluster_speed() -> None:
    run = _run(tp=2, dp_shard=4, zero=1)
    slow, fast = predict_run(run, parse_cluster("a100:8")), predict_run(run, parse_cluster("h100:8"))
    assert slow.peak_stage.allocated_bytes == fast.peak_stage.allocated_bytes
    assert slow.step_seconds > 1.5 * fast.step_seconds


@pytest.mark.parametrize("recipe", ["demo", "llama-3.1-8b-8gpu"])
def test_a_run_is_the_run_of_its_layout(recipe: str) -> None:
    run = load_run(recipe)
    assert with_layout(run, layout_of(run)) == run


def test_a_candidate_of_a_run_is_judged_like_its_prediction() -> None:
    cluster = parse_cluster("h100:8")
    for run in (_run(tp=2, dp_shard=4, zero=3), _run(dp_replicate=8), _run(pp=4, tp=2)):
        predicted, candidate = predict_run(run, cluster), candidate_of(run, cluster)
        assert candidate.fits == predicted.fits
        assert candidate.excess_bytes == predicted.excess_bytes
        assert candidate.step_seconds == predicted.step_seconds
