"""A request becomes a complete question."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.plans import planned

from meshwright.errors import SpecError, SpecErrors
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.request import Request, fill_request
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.text import dump_run


def test_what_is_not_given_is_filled_in_and_listed() -> None:
    filled = fill_request(Request("llama-3.1-8b", parse_cluster("leonardo:3"), parse_pins([])))
    assert len(filled.assumed) == 7
    assert filled.assumed[-1].startswith("separate documents of 1,024 tokens on average, lognormal")
    assert filled.tokens == 20 * filled.question.workload.counts.total


def test_an_assumed_batch_does_not_depend_on_the_number_of_devices() -> None:
    requests = [
        Request("llama-3.1-70b", parse_cluster(f"h100:{count}"), parse_pins([])) for count in (8, 24, 408)
    ]
    batches = [fill_request(request).question.run.data for request in requests]
    assert {data.batch_sequences for data in batches} == {512}


def test_a_batch_is_rounded_to_divide_well() -> None:
    plain = Request("llama-3.1-8b", parse_cluster("h100:8"), parse_pins([]), sequence_length=8192)
    assert fill_request(replace(plain, batch_tokens=4_000_000)).question.run.data.batch_sequences == 512
    assert fill_request(replace(plain, batch_tokens=7 * 8192)).question.run.data.batch_sequences == 7


def test_a_run_file_keeps_its_values_in_a_new_plan(tmp_path: Path) -> None:
    best = planned("llama-3.1-8b", "h100:8x8").best
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(best.run))
    again = fill_request(Request(str(file), parse_cluster("leonardo:16"), parse_pins([])))
    # Generated text has no dataset to read the lengths of documents from.
    assert [value.split(" of ")[0] for value in again.assumed] == ["separate documents"]
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
def test_absurd_requests_are_errors(change: dict[str, object], where: str) -> None:
    plain = Request("llama-3.1-8b", parse_cluster("h100:8"), parse_pins([]), sequence_length=4096)
    with pytest.raises(SpecError) as caught:
        fill_request(replace(plain, **change))
    error = caught.value.violations[0] if isinstance(caught.value, SpecErrors) else caught.value
    assert error.where == where


def test_a_blend_stays_the_data_of_a_new_plan(tmp_path: Path) -> None:
    best = planned("llama-3.1-8b", "h100:8x8").best.run
    parts = [{"path": str(tmp_path / name), "weight": 1} for name in ("a", "b")]
    data = best.data.with_(synthetic=None, blend=parts)
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(best.with_(data=data)))
    again = fill_request(Request(str(file), parse_cluster("leonardo:16"), parse_pins([])))
    assert [part.path for part in again.question.run.data.blend] == [part["path"] for part in parts]
    assert again.question.run.data.synthetic is None


def test_the_precision_that_is_asked_for_comes_after_the_run_file(tmp_path: Path) -> None:
    """It was left out without a word: a file in bf16 could not be planned for a device that has none."""
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.2-1b\nprecision: {compute: bf16, weights: bf16_exact, fp8: current}\n")
    plain = Request(str(file), parse_cluster("h100:1"), parse_pins([]))
    assert fill_request(plain).question.run.precision.fp8 is not None
    found = fill_request(replace(plain, precision="bf16")).question.run.precision
    assert (found.compute, found.weights, found.fp8) == ("bf16", "bf16_exact", None)
    file.write_text("model: llama-3.2-1b\nprecision: {compute: bf16}\n")
    found = fill_request(replace(plain, precision="fp16")).question.run.precision
    assert found.compute == "fp16" and found.loss_scale is not None


def test_a_part_of_the_weights_is_priced_as_all_of_them_and_says_so() -> None:
    plain = Request("llama-3.2-1b", parse_cluster("h100:1"), parse_pins(["train_only=[norm.weight]"]))
    told = "memory and time of training all weights, of which train_only freezes a part"
    assert told in fill_request(plain).assumed
    beside = fill_request(replace(plain, finetune="lora"))
    assert told not in beside.assumed


def test_a_recipe_is_planned_by_its_name_as_it_is_predicted() -> None:
    asked = Request("llama-3.1-8b-qlora-24gb", parse_cluster("rtx4090:1"), parse_pins([]))
    run = fill_request(asked).question.run
    assert run.adapter is not None and run.adapter.base == "nf4" and run.data.sequence_length == 4096


def test_an_error_in_a_run_file_names_no_line_of_the_completed_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.2-1b\nadapter: {rank: 8, alpha: 16, base: bf16}\n")
    with pytest.raises(SpecErrors) as refused:
        fill_request(Request(str(file), parse_cluster("t4:1"), parse_pins([])))
    assert refused.value.violations[0].where == f"{file} adapter.base"
