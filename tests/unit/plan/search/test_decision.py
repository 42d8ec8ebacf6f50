"""The decision agrees with the ladder in clear cases, always passes the rules, and becomes a run file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.plans import asked, planned

from meshwright.errors import PlanError, SpecError, SpecErrors
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.draw.document import (
    compute_optimal,
    coordinates,
    layout_words,
    plan_document,
    rank_map,
    run_file,
)
from meshwright.plan.explain.reasons import explain
from meshwright.plan.explain.rejected import rejected
from meshwright.plan.explain.relax import plan_or_relax
from meshwright.plan.predict import predict_run
from meshwright.plan.search.decision import Plan, make_plan, pareto_rows, ranking
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Priced
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.search.sizing import seconds_allowed, size_for_deadline
from meshwright.plan.workload.layouts import layouts
from meshwright.spec.check import check
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.text import dump_run, parse_run

DAY = 86400.0


def small_on_eight() -> Plan:
    return planned("gpt3-1.3b", "a100:8", seq=2048, batch_tokens=2**20)


def test_what_fits_on_one_device_stays_whole() -> None:
    best = planned("gpt3-125m", "a100:1", seq=2048, batch_tokens=2**19).best
    assert best.num_ranks == 1
    assert best.run.parallel == ParallelSpec()


def test_ddp_while_the_whole_state_fits() -> None:
    best = small_on_eight().best
    assert best.run.parallel == ParallelSpec(dp_replicate=8)
    assert best.run.memory.recompute == "none"


def test_state_too_large_for_one_device_is_sharded_without_cutting_layers() -> None:
    parallel = planned("llama-3.1-8b", "h100:8x8").best.run.parallel
    assert parallel.zero == 3
    assert (parallel.tp, parallel.pp, parallel.cp) == (1, 1, 1)


def test_large_models_are_cut_inside_a_node() -> None:
    """Few tokens per device do not hide the gathers of whole layers; at 8192 tokens FSDP alone is as fast."""
    here = "memory.offload=[]"
    parallel = planned("llama-3.1-70b", "dgx-h100:8", here, seq=4096, batch_tokens=2**18).best.run.parallel
    assert parallel.zero == 3
    assert 1 < parallel.tp <= 8


def test_hundreds_of_billions_take_everything() -> None:
    """Meta published tp 8, pp 16, dp 128 for this model on 16,384 H100; half the stages are as good here."""
    parallel = planned("llama-3.1-405b", "h100:8x2048", batch_tokens=2**24).best.run.parallel
    assert parallel.tp == 8
    assert (parallel.pp, parallel.dp) in ((16, 128), (8, 256))
    # Sharing the moments costs no more than summing whole gradients, and frees what fewer stages need.
    assert parallel.zero >= 1


def test_tensor_parallel_stays_inside_the_node() -> None:
    fitting = planned("llama-3.1-70b", "leonardo:32").found.fitting
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


def test_equals_are_decided_for_the_simpler() -> None:
    at = layouts(dp_replicate=[8, 1, 1], dp_shard=[1, 8, 8], zero=[0, 1, 3])
    priced = Priced(at, np.array([3.0, 2.0, 1.0]), np.array([1.015, 1.000, 1.03]))
    assert ranking(priced, "speed").tolist() == [0, 1, 2]
    assert ranking(priced, "memory").tolist() == [2, 1, 0]


def test_the_explanation_speaks_the_ladder() -> None:
    words = " ".join(explain(small_on_eight()))
    assert "The whole state fits on one GPU: DDP over 8 ranks is fastest" in words
    assert "you do not need" in words
    words = " ".join(explain(planned("llama-3.1-8b", "h100:8x8")))
    assert "does not fit on one" in words
    assert "ZeRO-3: optimizer states, gradients and weights are shared over 64 ranks" in words


def test_every_technique_in_use_is_justified_with_a_number() -> None:
    words = explain(planned("llama-3.1-405b", "h100:8x2048", batch_tokens=2**24))
    assert any(sentence.startswith("tp=8") and "Without it" in sentence for sentence in words)
    assert any(
        sentence.startswith("pp=") and "across nodes" in sentence and "bubble" in sentence
        for sentence in words
    )


def test_neighbours_are_rejected_for_reasons() -> None:
    reasons = {each.change: each.reason for each in rejected(planned("llama-3.1-8b", "h100:8x8").best)}
    assert "does not fit" in reasons["zero=3 -> 2"]
    assert "slower" in reasons["recompute=none -> full"]
    assert "tensor-parallel messages" in reasons["tp=1 -> 2"]
    vocabulary = {each.change: each.reason for each in rejected(small_on_eight().best)}
    assert "does not divide vocab_size=50257" in vocabulary["tp=1 -> 2"]


def test_a_pinned_axis_has_no_neighbours() -> None:
    plan = planned("llama-3.1-8b", "h100:8x8", "tp=2")
    assert not [each for each in rejected(plan.best) if each.change.startswith("tp=")]


def test_run_file_reads_back_equal_with_its_rank_map() -> None:
    plan = planned("llama-3.1-70b", "dgx-h100:8")
    text = run_file(plan, explain(plan))
    assert parse_run(text).require_valid() == plan.best.run
    assert "#   node 7: ranks 56 to 63" in text


def test_rank_map_of_the_affinity_figure() -> None:
    """2 nodes x 8 devices, tp 2, pp 4, dp 2: neighbours on tp are neighbours on the node."""
    parallel = ParallelSpec(tp=2, pp=4, dp_replicate=2)
    assert [coordinates(parallel, rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    last = coordinates(parallel, 15)
    assert (last["pp"], last["dp_replicate"], last["tp"]) == (3, 1, 1)
    assert rank_map(parallel, 8)[1] == "  node 0: ranks 0 to 7: pp 0 to 1, dp_replicate 0 to 1, tp 0 to 1"


def test_layout_words() -> None:
    assert layout_words(small_on_eight().best.run).startswith("dp_replicate=8 micro=")


def test_document_is_complete_json() -> None:
    plan = small_on_eight()
    document = plan_document(plan, tokens=10**12, assumed=(), why=["x"], rejected=rejected(plan.best))
    again = json.loads(json.dumps(document))
    assert again["best"]["fits"] is True
    assert again["best"]["days"] == pytest.approx(plan.best.days(10**12))
    assert again["fingerprint"] == plan.best.run.fingerprint()
    assert len(again["rejected"]) > 3


def test_compute_optimal_spends_the_budget_at_20_tokens_per_parameter() -> None:
    size, tokens = compute_optimal(6 * 70e9 * 1.4e12)
    assert size == pytest.approx(70e9)
    assert tokens == pytest.approx(1.4e12)


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(PlanError, match="does not fit on 1 x NVIDIA H100") as caught:
        plan_or_relax(asked("llama-3.1-8b", "h100:1", "memory.offload=[]").question)
    assert caught.value.exit_code == 3
    assert "devices instead of 1 (" in caught.value.hint
    assert "drop memory.offload=[] (" in caught.value.hint
    assert "on the host)" in caught.value.hint


def test_a_pin_that_stands_in_the_way_is_named() -> None:
    question = asked("llama-3.1-8b", "h100:8", "zero=0", "tp=1", "pp=1", "memory.offload=[]").question
    with pytest.raises(PlanError) as caught:
        plan_or_relax(question)
    assert "drop zero=0" in caught.value.hint
    assert "GiB per device" in caught.value.hint


@pytest.mark.parametrize(
    ("pins", "fact", "hint"),
    [
        (["tp=3"], "tp=3 does not divide num_heads=32", "drop tp=3"),
        (["tp=8", "pp=4"], "need 32 ranks, and the cluster has 8 devices", "drop tp=8 or drop pp=4"),
        (["pp=4", "schedule=zbv", "recompute=full"], "would re-run a block", "drop schedule=zbv"),
        (["zero=2", "dp_shard=1", "cp=1"], "nothing to share state with", "drop zero=2"),
    ],
)
def test_contradictory_pins_name_the_rule_and_what_to_drop(pins: list[str], fact: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_or_relax(asked("llama-3.1-8b", "h100:8", *pins).question)
    assert fact in caught.value.fact
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_deadline_gives_the_smallest_cluster_that_meets_it() -> None:
    question = asked("llama-3.1-8b", "h100").question
    sized = size_for_deadline(question, tokens=10**12, deadline_seconds=30 * DAY, open_ended=True)
    allowed = seconds_allowed(question, tokens=10**12, deadline_seconds=30 * DAY)
    assert make_plan(sized).found.fitting.step_seconds.min() <= allowed
    smaller = replace(sized, cluster=parse_cluster("h100").with_devices(sized.cluster.num_devices - 8))
    assert make_plan(smaller).found.fitting.step_seconds.min() > allowed


def test_an_impossible_deadline_says_what_is_possible() -> None:
    question = asked("llama-3.1-8b", "h100:8").question
    with pytest.raises(PlanError, match=r"at best .* on 8 x"):
        size_for_deadline(question, tokens=10**12, deadline_seconds=DAY, open_ended=False)


def test_what_is_not_said_is_filled_in_and_told() -> None:
    filled = fill_request(Request("llama-3.1-8b", parse_cluster("leonardo:3"), parse_pins([])))
    assert len(filled.assumed) == 6
    assert filled.tokens == 20 * filled.question.work.counts.total
    assert filled.question.run.data.batch_sequences % 3 == 0


def test_a_batch_is_rounded_to_what_can_be_dealt_out() -> None:
    plain = Request("llama-3.1-8b", parse_cluster("h100:8"), parse_pins([]), sequence_length=8192)
    assert fill_request(replace(plain, batch_tokens=4_000_000)).question.run.data.batch_sequences == 512
    assert fill_request(replace(plain, batch_tokens=7 * 8192)).question.run.data.batch_sequences == 7


def test_a_run_file_is_planned_anew_with_what_it_says(tmp_path: Path) -> None:
    best = planned("llama-3.1-8b", "h100:8x8").best
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(best.run))
    again = fill_request(Request(str(file), parse_cluster("leonardo:16"), parse_pins([])))
    assert again.assumed == ()
    assert again.question.run.data.batch_tokens == best.run.data.batch_tokens
    assert again.question.run.parallel == ParallelSpec()
    assert again.tokens == best.run.schedule.num_steps * best.run.data.batch_tokens


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sequence_length": 10**9}, "--seq"),
        ({"sequence_length": 0}, "--seq"),
        ({"batch_tokens": 100}, "--batch-tokens"),
        ({"tokens": 10**20}, "--tokens"),
        ({"precision": "bf61"}, "--precision"),
        ({"model": "llama-3.1-9b"}, "model"),
    ],
)
def test_absurd_requests_are_refused(change: dict[str, object], where: str) -> None:
    plain = Request("llama-3.1-8b", parse_cluster("h100:8"), parse_pins([]), sequence_length=4096)
    with pytest.raises(SpecError) as caught:
        fill_request(replace(plain, **change))
    error = caught.value.violations[0] if isinstance(caught.value, SpecErrors) else caught.value
    assert error.where == where


def test_objective_cost_uses_fewer_device_hours() -> None:
    fast = planned("llama-3.1-70b", "dgx-h100:16").best
    cheap = make_plan(asked("llama-3.1-70b", "dgx-h100:16", objective="cost").question).best
    assert cheap.device_hours(10**12) <= fast.device_hours(10**12) * 1.001


def test_predict_says_the_same_about_the_run_that_was_planned() -> None:
    best = planned("llama-3.1-70b", "dgx-h100:8", "pp=2").best
    same = predict_run(best.run, best.question.cluster)
    assert same.step_seconds == pytest.approx(best.step_seconds, rel=1e-12)
    assert same.fullest.device_bytes == pytest.approx(best.device_bytes, rel=1e-12)
    assert same.mfu == pytest.approx(best.mfu, rel=1e-12)
