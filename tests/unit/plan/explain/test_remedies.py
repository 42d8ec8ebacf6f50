"""What to change in a run that does not fit, and by how much."""

from tests.unit.rehearse.test_prove import large_run

from meshwright.hardware import parse_cluster
from meshwright.plan.explain.remedies import remedies, remedy_words
from meshwright.plan.predict import predict_run
from meshwright.spec import ParallelSpec, PrecisionSpec, RunSpec
from meshwright.spec.check import check

BF16 = PrecisionSpec(compute="bf16")


def too_large(parallel: ParallelSpec, *, microbatch: int = 8) -> RunSpec:
    run = large_run("llama-3.1-8b", parallel, precision=BF16)
    data = run.data.with_(sequence_length=4096, microbatch_sequences=microbatch)
    return run.with_(data=data)


def test_single_changes_fit_and_are_sorted_by_speed():
    run, cluster = too_large(ParallelSpec(dp_shard=8, zero=3)), parse_cluster("h100:8")
    assert not predict_run(run, cluster).fits
    found = remedies(run, cluster)
    assert found
    for remedy in found:
        assert not check(remedy.run)
        again = predict_run(remedy.run, cluster)
        assert again.fits and again.step_seconds == remedy.step_seconds
        assert len(remedy.settings) == 1
    seconds = [remedy.step_seconds for remedy in found]
    assert seconds == sorted(seconds)
    assert "per device" in remedy_words(found, cluster)


def test_two_changes_where_one_is_not_enough():
    run, cluster = too_large(ParallelSpec(dp_replicate=8)), parse_cluster("h100:8")
    found = remedies(run, cluster)
    assert found
    assert all("parallel.zero" in remedy.settings and len(remedy.settings) > 3 for remedy in found)


def test_when_nothing_helps_more_devices_are_named():
    run, cluster = too_large(ParallelSpec()), parse_cluster("h100:1")
    assert remedies(run, cluster) == []
    assert "on 1 devices" in remedy_words([], cluster)
