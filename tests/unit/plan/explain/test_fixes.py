"""Changes with which a run that does not fit would fit."""

from tests.unit.rehearse.test_prove import large_run

from meshwright.hardware import parse_cluster
from meshwright.plan.explain.fixes import fixes_text, run_fixes
from meshwright.plan.predict import predict_run
from meshwright.spec import ParallelSpec, PrecisionSpec, RunSpec
from meshwright.spec.check import check
from meshwright.spec.text import load_run

BF16 = PrecisionSpec(compute="bf16")


def too_large(parallel: ParallelSpec, *, microbatch: int = 8) -> RunSpec:
    run = large_run("llama-3.1-8b", parallel, precision=BF16)
    data = run.data.with_(sequence_length=4096, microbatch_sequences=microbatch)
    return run.with_(data=data)


def test_single_changes_fit_and_are_sorted_by_speed():
    run, cluster = too_large(ParallelSpec(dp_shard=8, zero=3)), parse_cluster("h100:8")
    assert not predict_run(run, cluster).fits
    found = run_fixes(run, cluster)
    assert found
    for fix in found:
        changed = fix.change.question.run
        assert not check(changed)
        predicted = predict_run(changed, cluster)
        assert predicted.fits
        assert predicted.step_seconds == fix.step_seconds
        assert predicted.peak_stage.device_bytes == fix.device_bytes
        assert fix.change.text.count("=") == 1
    seconds = [fix.step_seconds for fix in found]
    assert seconds == sorted(seconds)
    assert "per device" in fixes_text(found, cluster)


def test_two_changes_where_one_is_not_enough():
    run, cluster = too_large(ParallelSpec(dp_replicate=8)), parse_cluster("h100:8")
    found = run_fixes(run, cluster)
    assert found
    assert all("parallel.zero=" in fix.change.text and fix.change.text.count("=") > 3 for fix in found)


def test_when_nothing_helps_more_devices_are_named():
    run, cluster = too_large(ParallelSpec()), parse_cluster("h100:1")
    assert run_fixes(run, cluster) == []
    assert "on 1 device:" in fixes_text([], cluster)


def test_a_run_with_adapters_is_told_of_its_base_of_offload_and_of_recompute_in_every_layer():
    cluster = parse_cluster("rtx4080:1")
    lora, qlora = (load_run(f"llama-3.1-8b-{kind}-24gb") for kind in ("lora", "qlora"))
    texts = [[fix.change.text for fix in run_fixes(run, cluster)] for run in (lora, qlora)]
    assert texts == [["adapter.base=nf4"], ["memory.offload=[activations]", "memory.recompute_every=1"]]
    for text in texts[1]:
        changed = load_run("llama-3.1-8b-qlora-24gb", [text])
        assert not check(changed) and predict_run(changed, cluster).fits
