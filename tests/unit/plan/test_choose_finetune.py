"""`plan --finetune auto`, and a kind of fine-tuning beside pins and run files that say something else."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run as command
from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.choose_finetune import choose_finetune
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.finetune import FineTuning
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Question
from meshwright.plan.search.request import Request, fill_request
from meshwright.units import show_bytes

WITH_ADAPTERS = """\
model: {family: llama-3.1-8b, num_layers: 4}
adapter: {rank: 16, alpha: 32, base: bf16}
train_only: ["*norm*"]
precision: {compute: bf16}
optim: {lr: 2e-4, weight_decay: 0}
schedule: {num_steps: 10}
data: {synthetic: {}, sequence_length: 4096, batch_sequences: 8, microbatch_sequences: 1, documents: joined}
"""


def question(model: str, on: str, finetune: FineTuning, *pins: str, seq: int = 2048) -> Question:
    request = Request(model, parse_cluster(on), parse_pins(pins), sequence_length=seq, finetune=finetune)
    return fill_request(request).question


def test_auto_takes_qlora_where_lora_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """8B on a card of 16 GB without bf16: unquantised weights would be in fp32."""
    arguments = ["plan", "llama-3.1-8b", "--on", "t4:1", "--seq", "2048", "--finetune", "auto"]
    assert command(arguments) == 0
    shown, reason = capsys.readouterr(), "does not fit on the devices alone: it needs"
    assert f"finetune: full fine-tuning {reason}" in shown.err
    assert f"finetune: lora (frozen weights unquantised) {reason}" in shown.err
    assert "finetune: qlora (frozen weights in 4 bits) fits in" in shown.err
    assert "frozen weights in nf4 (adapter.base)" in shown.err


def test_auto_keeps_its_reasons_in_files_and_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advice for training from scratch is none for a model that is trained already."""
    asked = ["plan", "llama-3.1-8b", "--on", "rtx4090:1", "--finetune", "auto", "--seq", "2048"]
    files = ["-o", str(tmp_path / "run.yaml"), "--report", str(tmp_path / "plan.html")]
    assert command([*asked, *files, "--json"]) == 0
    document, report = json.loads(capsys.readouterr().out), (tmp_path / "plan.html").read_text()
    reason = "lora (frozen weights unquantised) fits in"
    assert any(sentence.startswith(reason) for sentence in document["why"])
    assert f"# {reason}" in (tmp_path / "run.yaml").read_text() and reason in report
    assert document["compute_optimal"] is None and "compute-optimal" not in report
    assert document["formats"] == "bf16, adamw, compiled, lora of rank 16 on bf16 weights"


def test_auto_that_finds_nothing_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3.1-405b", "--on", "rtx4060:1", "--finetune", "auto", "--json"]
    assert command(asked) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["error"]["fact"].endswith("that is qlora (frozen weights in 4 bits), which needs least")


def test_auto_says_what_the_rules_do_not_allow() -> None:
    def ask(kind: FineTuning) -> Question:
        if kind == "qlora":
            raise SpecError("adapter.base=nf4 with something else", where="adapter.base")
        return question("llama-3.1-8b", "rtx4090:1", kind)

    found = choose_finetune(ask)
    assert found.kind == "lora" and "is not possible: adapter.base=nf4 with" in found.reasons[0]


def test_auto_says_why_there_is_no_smaller_kind(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(kind: FineTuning) -> Question:
        if kind != "full":
            raise SpecError(f"no {kind} here", where="model")
        return question("llama-3.1-8b", "rtx4060:1", kind)

    with pytest.raises(PlanError) as refused:
        choose_finetune(ask)
    fact = refused.value.fact
    assert "that is full fine-tuning; lora (frozen weights unquantised) is not possible: no lora here" in fact
    assert "needs least" not in fact


@pytest.mark.parametrize(("model", "on"), [("llama-3.1-8b", "a6000:4"), ("llama-3.1-8b", "h100:8")])
def test_auto_names_the_figures_of_the_plan_that_follows(model: str, on: str) -> None:
    """Full fine-tuning fits four A6000 without offload, and is faster with it."""
    found = choose_finetune(lambda kind: question(model, on, kind, seq=4096))
    best = make_plan(question(model, on, found.kind, seq=4096)).best
    speed = f"{best.tokens_per_second / best.num_ranks:,.0f} tokens/s/GPU"
    (fits,) = (each for each in found.reasons if each.startswith("full fine-tuning fits"))
    assert fits.endswith(f"in {show_bytes(best.device_bytes)} at {speed}")
    assert ("fits without offload; the plan has activations" in fits) == bool(best.run.memory.offload)


@pytest.mark.parametrize(
    ("base", "fits", "impossible"),
    [
        ("bf16", "lora (frozen weights unquantised)", "qlora (frozen weights in 4 bits) is not possible"),
        ("fp8", "lora (frozen weights in fp8)", "qlora (frozen weights in 4 bits) is not possible"),
        ("nf4", "qlora (frozen weights in 4 bits)", None),
    ],
)
def test_a_format_that_is_asked_for_is_one_kinds_alone(
    base: str, fits: str, impossible: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "llama-3.1-8b", "--on", "rtx4090:1", "--seq", "2048", "--finetune", "auto"]
    assert command([*arguments, f"adapter.base={base}"]) == 0
    told = capsys.readouterr().err
    assert f"finetune: {fits} fits in" in told and "finetune: instead" not in told
    assert (impossible or "finetune: full") in told and ("is not possible" in told) == bool(impossible)
    assert "(adapter.base)" not in told, "what is pinned is not assumed"


def test_pins_that_neither_kind_of_adapters_can_have_are_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Full fine-tuning, which has no adapters, is no answer to a name that was written wrongly."""
    asked = ["plan", "llama-3.1-8b", "--on", "h100:8", "--finetune", "auto", "adapter.targets=[q_prj]"]
    assert command(asked) == 2
    assert "target 'q_prj' matches no linear" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "pin", "text"),
    [
        ("full", "adapter.rank=8", "--finetune full with adapter.rank=8: full fine-tuning has no adapters"),
        (
            "qlora",
            "adapter.base=bf16",
            "--finetune qlora with adapter.base=bf16: QLoRA has frozen weights in",
        ),
    ],
)
def test_pins_of_another_kind_are_refused(kind: FineTuning, pin: str, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        question("llama-3.1-8b", "h100:8", kind, pin)


def test_what_is_pinned_is_not_assumed() -> None:
    pins = parse_pins(["adapter.rank=64", "adapter.base=nf4_nested", "checkpoint.start_from=base"])
    request = Request("llama-3.1-8b", parse_cluster("h100:1"), pins, finetune="qlora")
    assumed = " ".join(fill_request(request).assumed)
    assert "adapters of alpha 32, targets all-linear (adapter.alpha, adapter.targets)" in assumed
    assert "frozen weights" not in assumed and "pre-trained weights" not in assumed


@pytest.mark.parametrize(
    ("kind", "base", "told"),
    [
        ("lora", "bf16", None),
        ("qlora", "nf4", "frozen weights in nf4 instead of bf16: --finetune qlora"),
        ("full", None, "no adapters, unlike the run file"),
    ],
)
def test_the_kind_that_is_asked_for_comes_after_the_run_file(
    tmp_path: Path, kind: FineTuning, base: str | None, told: str | None
) -> None:
    """It was planned with the adapters of the file, under the name of the kind."""
    file = tmp_path / "run.yaml"
    file.write_text(WITH_ADAPTERS)
    request = Request(str(file), parse_cluster("h200:1"), parse_pins([]), finetune=kind)
    filled = fill_request(request)
    run = filled.question.run
    assert (run.adapter.base if run.adapter is not None else None) == base
    assert run.train_only == (() if kind == "full" else ("*norm*",))
    assert told is None or told in " ".join(filled.assumed)


def test_full_fine_tuning_that_names_no_weights_yet_is_no_training_from_scratch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = tmp_path / "run.yaml", tmp_path / "plan.html"
    asked = ["plan", "llama-3.2-1b", "--on", "h100:1", "--finetune", "full", "--json"]
    assert command([*asked, "-o", str(file), "--report", str(report)]) == 0
    assert json.loads(capsys.readouterr().out)["compute_optimal"] is None
    assert "compute-optimal" not in report.read_text()
    lacks = (
        "# Set checkpoint.start_from to the folder of the pre-trained weights: without it train starts from"
    )
    assert lacks in file.read_text()


def test_auto_is_not_sized_for_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    """Which kind fits depends on the number of devices, which is what the deadline decides."""
    asked = ["plan", "llama-3.1-8b", "--on", "rtx4090", "--finetune", "auto", "--deadline", "2h"]
    assert command(asked) == 2
    assert "name the kind: full, lora or qlora" in capsys.readouterr().err
