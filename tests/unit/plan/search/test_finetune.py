"""`plan --finetune`: adapters on frozen weights, priced without their gradients, in a valid run file."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run as command
from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.choose_finetune import choose_finetune
from meshwright.plan.explain.gains import gains
from meshwright.plan.explain.reasons import explain
from meshwright.plan.explain.storage import checkpoint_bytes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.predict import predict_run
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.finetune import FineTuning, longest_context, require_known
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Question
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.workload.formats import workload_of
from meshwright.spec.adapter import adaptable, adapter_parameters
from meshwright.spec.check import check
from meshwright.spec.text import load_run, read_run

HERE = "memory.offload=[]"
SELECTIVE = """\
model: {family: llama-3.1-8b, num_layers: 4}
adapter: {rank: 16, alpha: 32, base: bf16}
compile: true
precision: {compute: bf16}
memory: {recompute: selective}
optim: {lr: 2e-4, weight_decay: 0}
schedule: {num_steps: 10}
data: {synthetic: {}, sequence_length: 4096, batch_sequences: 8, microbatch_sequences: 1, documents: joined}
"""


def question(model: str, on: str, finetune: FineTuning, *pins: str, seq: int = 2048) -> Question:
    request = Request(model, parse_cluster(on), parse_pins(pins), sequence_length=seq, finetune=finetune)
    return fill_request(request).question


def planned(model: str, on: str, finetune: FineTuning, *pins: str, seq: int = 2048) -> Plan:
    return make_plan(question(model, on, finetune, *pins, seq=seq))


def test_lora_of_8b_fits_a_card_of_24_gb_and_full_fine_tuning_does_not() -> None:
    lora = planned("llama-3.1-8b", "rtx4090:1", "lora", HERE)
    assert lora.best.run.adapter is not None and not check(lora.best.run)
    with pytest.raises(PlanError):
        planned("llama-3.1-8b", "rtx4090:1", "full", HERE)
    text = " ".join(explain(lora))
    assert "8.03B frozen parameters (2 bytes each, 15.0 GiB) and 41.9M trained ones" in text
    assert "Longest context that fits, with full recompute: " in text


def test_lora_of_70b_does_not_fit_three_a100_of_64_gb_and_fits_four() -> None:
    """As measured on Leonardo with Accelerate and FSDP: out of memory on three GPUs."""
    layout = ("zero=3", "tp=1", "pp=1", "cp=1", "recompute=full", "microbatch_sequences=4", HERE)
    batch = ("data.batch_sequences=96",)
    four = planned("llama-2-70b", "leonardo:1", "lora", *layout, *batch)
    assert four.best.num_ranks == 4
    three = parse_cluster("leonardo:1").with_devices(3)
    request = Request(
        "llama-2-70b", three, parse_pins([*layout, *batch]), sequence_length=2048, finetune="lora"
    )
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(fill_request(request).question)


def test_frozen_weights_cost_no_weight_gradient_and_no_state() -> None:
    lora, full = (question("llama-3.1-8b", "h100:8", kind, HERE) for kind in ("lora", "full"))
    assert lora.workload.model_flops_per_token == pytest.approx(full.workload.model_flops_per_token * 2 / 3)
    run = lora.run
    adapters = workload_of(run).adapters
    assert adapters is not None and adapters.base_bits == 16
    trained = sum(one.num_elements for one in adapter_parameters(run.model, run.adapter))
    assert adapters.share(run.model.width) * workload_of(run).counts.total == pytest.approx(trained)
    assert make_plan(lora).best.step_seconds < make_plan(full).best.step_seconds


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.5), ("nf4_nested", 4.126953125), ("fp8", 8.0)])
def test_routed_experts_are_planned_in_every_format(base: str, bits: float) -> None:
    """Qwen3-30B-A3B: 95% of its weights are experts; the others of the blocks are packed too."""
    asked = question("qwen3-30b-a3b", "h100:8", "lora", f"adapter.base={base}", HERE)
    work = workload_of(asked.run)
    assert work.adapters is not None and work.adapters.packed_bits == bits
    packed = sum(one.num_elements for one in adaptable(asked.run.model)) / work.counts.total
    assert packed > 0.95
    assert work.adapters.base_bits == pytest.approx(packed * bits + (1 - packed) * 16)
    assert work.low_precision_experts == (base == "fp8")
    best = make_plan(asked).best
    assert best.run.adapter is not None and best.run.adapter.base == base and not check(best.run)


@pytest.mark.parametrize(
    ("base", "length", "recompute", "measured_gib"),
    [
        ("bf16", 4096, "none", 50.2),
        ("bf16", 4096, "selective", 39.3),
        ("fp8", 4096, "none", 43.7),
        ("bf16", 2048, "full", 17.2),
        ("nf4", 2048, "full", 7.9),
    ],
)
def test_memory_of_8b_is_what_was_measured_on_an_h200(
    base: str, length: int, recompute: str, measured_gib: float
) -> None:
    """bench/results/finetune_h200_2026-11-16.md: rank 16 on all linears, two sequences, compiled."""
    pins = (f"adapter.base={base}", "data.documents=joined", f"memory.recompute={recompute}")
    asked = question("llama-3.1-8b", "h200:1", "lora", *pins, "data.batch_sequences=2", seq=length)
    data = asked.run.data.with_(microbatch_sequences=2)
    memory = asked.run.memory.with_(recompute=recompute)
    found = predict_run(asked.run.with_(data=data, memory=memory), asked.cluster)
    assert found.peak_stage.allocated_bytes / 2**30 == pytest.approx(measured_gib, rel=0.07)
    if recompute == "none" and base == "bf16":
        assert found.tokens_per_second_per_device == pytest.approx(16129, rel=0.05)


@pytest.mark.parametrize(
    ("on", "pins", "traced_gib"),
    [
        ("h200:1", (), 5.571),
        ("h200:1", ("adapter.kind=dora",), 7.136),
        ("h200:2", ("parallel.tp=2",), 3.973),
        ("h200:4", ("parallel.dp_shard=4", "parallel.zero=1"), 5.541),
        ("h200:4", ("parallel.dp_shard=4", "parallel.zero=3"), 6.101),
        ("h200:4", ("parallel.dp_shard=4", "parallel.zero=3", "compile=false"), 6.351),
        ("h200:4", ("parallel.dp_shard=4", "parallel.zero=3", "adapter.base=nf4"), 4.489),
        ("h200:4", ("parallel.cp=4", "parallel.zero=3"), 4.050),
    ],
)
def test_selective_recompute_keeps_what_adapters_add_apart_from_sharded_weights(
    tmp_path: Path, on: str, pins: tuple[str, ...], traced_gib: float
) -> None:
    """`rehearse` of 8 sequences of 4,096 tokens in four layers of 8B, as traced on 2026-11-19. Without the
    adapters' outputs, 70B on a node of Leonardo was said to fit and traced 12 GiB more."""
    file = tmp_path / "run.yaml"
    file.write_text(SELECTIVE)
    found = predict_run(load_run(file, pins), parse_cluster(on))
    assert found.peak_stage.allocated_bytes / 2**30 == pytest.approx(traced_gib, rel=0.04)


@pytest.mark.parametrize(
    ("on", "rehearsed", "published"),
    [
        ("rtx4060:1", 7168, 2972),
        ("rtx3060:1", 26624, 21848),
        ("rtx4080:1", 45056, 40724),
        ("rtx4090:1", 83968, 78475),
        ("h100:1", 352256, 342733),
    ],
)
def test_longest_context_of_8b_qlora_is_what_the_rehearsal_finds(
    on: str, rehearsed: int, published: int
) -> None:
    """`rehearse` fits the second column (compiled, full recompute, activations and embedding on the host) on
    the card; the third is unsloth's table for 8, 12, 16, 24 and 80 GB. A plan leaves 5% of the card free and
    assumes more fragmentation: up to half a GiB, which is most of the room for activations on 8 GB."""
    found = longest_context(question("llama-3.1-8b", on, "qlora"))
    assert rehearsed >= published
    assert (0.75 if rehearsed < 10_000 else 0.85) * rehearsed <= found.with_offload <= rehearsed
    assert 0 < found.on_device < found.with_offload


def test_a_learned_position_table_limits_the_context() -> None:
    assert longest_context(question("gpt2-124m", "h100:1", "lora", seq=1024)).on_device == 1024


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


def test_offload_is_for_what_does_not_fit_without() -> None:
    fits, tight = (planned("llama-3.1-8b", "rtx4090:1", "qlora", seq=seq) for seq in (2048, 65536))
    assert not fits.best.run.memory.offload and tight.best.run.memory.offload == ("activations",)


def test_qlora_is_slower_than_lora_in_the_same_layout() -> None:
    """Weights are dequantised in each pass: torchtune publishes 2,413 and 3,083 tokens/s on a 4090."""
    pins = ("recompute=full", "microbatch_sequences=2", "recompute_every=1")
    lora, qlora = (planned("llama-3.1-8b", "rtx4090:1", kind, *pins).best for kind in ("lora", "qlora"))
    assert qlora.step_seconds > lora.step_seconds and qlora.device_bytes < lora.device_bytes


def test_a_checkpoint_has_the_adapters_alone() -> None:
    asked = question("llama-3.1-8b", "h100:1", "lora")
    assert checkpoint_bytes(asked) == pytest.approx(41.9e6 * 12, rel=0.01)


def test_the_run_file_has_the_adapter_and_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    arguments = ["plan", "llama-3.1-8b", "--on", "rtx4090:1", "--seq", "2048", HERE]
    assert command([*arguments, "--finetune", "auto", "adapter.rank=8", "-o", str(file)]) == 0
    told = capsys.readouterr().err
    assert "finetune: lora (frozen weights unquantised) fits in" in told
    assert "finetune: instead, qlora (frozen weights in 4 bits) fits in" in told
    run = read_run(str(file)).require_valid()
    assert run.adapter is not None and run.adapter.rank == 8 and run.adapter.base == "bf16"


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
    file.write_text(f'{SELECTIVE}train_only: ["*norm*"]\n')
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


def test_experts_that_do_not_fit_one_device_are_an_error_of_memory() -> None:
    """ep borrows its ranks from dp and cp: one device has no part of the experts alone."""
    with pytest.raises(PlanError, match="does not fit on 1 x NVIDIA RTX 4090 24GB: the layout that comes"):
        planned("qwen3-30b-a3b", "rtx4090:1", "qlora")


def test_words_that_are_none_are_refused() -> None:
    assert require_known(None) is None and require_known("lora") == "lora"
    with pytest.raises(SpecError, match="--finetune is 'dora'"):
        require_known("dora")


@pytest.mark.parametrize(("kind", "rate"), [("full", 1e-5), ("lora", 2e-4), ("qlora", 2e-4)])
def test_the_learning_rate_is_that_of_fine_tuning_unless_it_is_set(kind: FineTuning, rate: float) -> None:
    optim = question("llama-3.2-1b", "h100:8", kind).run.optim
    assert (optim.lr, optim.weight_decay) == (rate, 0.0)
    optim = question("llama-3.2-1b", "h100:8", kind, "optim.lr=7e-5", "optim.weight_decay=0.01").run.optim
    assert (optim.lr, optim.weight_decay) == (7e-5, 0.01)


def test_lora_that_does_not_fit_is_told_of_qlora() -> None:
    with pytest.raises(PlanError) as refused:
        planned("llama-3.1-8b", "t4:1", "lora")
    assert "- adapter.base=nf4 (QLoRA) (" in refused.value.hint


def test_a_gain_of_other_numerics_is_there_when_they_are_allowed() -> None:
    """Moments of adapters are small; with adapters, host memory is not what makes a plan faster."""
    plan = planned("llama-3.1-8b", "rtx4090:1", "lora", seq=4096)
    assert {gain.name for gain in gains(plan)}.isdisjoint({"adamw_8bit", "bf16_moments"})


def test_a_node_of_an_odd_number_of_devices_is_filled_up() -> None:
    with pytest.raises(PlanError) as refused:
        planned("llama-3.1-70b", "a100-64gb:3", "full", seq=4096)
    assert "- 8 devices instead of 3 (" in refused.value.hint
