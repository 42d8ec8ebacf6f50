"""Our own step under the clock; the contenders of `bench.step` compute the same."""

import json
from pathlib import Path
from unittest.mock import patch

import bench.step as program
import numpy as np
import pytest
import torch
from bench.contenders.hf_model import hf_model
from bench.contenders.plain import plain_model
from bench.contenders.protocol import IGNORED, Job, TokenRows
from bench.contenders.registry import notes_of, selected_contenders
from bench.interleaved.entries import entries_of
from bench.ladder import climb, rungs_of, without_rungs
from bench.ladder import measure as measure_ladder
from bench.ladder import parse as ladder_options
from bench.reports.step import losses_agree, merged, picture, write_results
from bench.workloads.cases import CASES, with_microbatch
from tests.support.runs import tiny_run

from meshwright.bench.random_tokens import document_ends, write_random_tokens
from meshwright.bench.step import fill_on_device, measure_step, on_random_tokens
from meshwright.errors import SpecError
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import RunSpec
from meshwright.train.build import build_data, build_training
from meshwright.train.step import train_step

CPU = torch.device("cpu")
# float32 sums in another order: some hundred roundings of 6e-8.
RTOL = 1e-5


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> RunSpec:
    name = getattr(request, "param", "tiny")
    case = CASES[name]
    write_random_tokens(tmp_path / "tokens", vocab_size=case.model.vocab_size, num_tokens=1 << 12)
    options = program.parse(
        ["--case", name, "--precision", "fp32", "--device", "cpu", "--eager", "--accumulation", "1"]
    )
    return program.build_run(case, options, tmp_path / "tokens")


def our_losses(run: RunSpec, num_steps: int, without: tuple[str, ...] = ()) -> list[float]:
    mesh = build_mesh(run.parallel, join_world("cpu"))
    try:
        with without_rungs(without) as adjust:
            training = build_training(run, mesh, fill=fill_on_device)
            batches = build_data(run, mesh)
            adjust(training)
            losses = [
                float(train_step(training, next(batches), learning_rate=1e-3).loss) for _ in range(num_steps)
            ]
            batches.close()
        return losses
    finally:
        leave_world()


def first_rows(run: RunSpec) -> tuple[torch.Tensor, torch.Tensor]:
    batches = build_data(run, build_mesh(run.parallel, join_world("cpu")))
    first = next(batches).microbatches[0]
    batches.close()
    leave_world()
    return first.tokens_BS, first.targets_BS


@pytest.mark.parametrize("run", ["tiny", "tiny-gpt"], indirect=True)
def test_contenders_start_from_the_same_loss(run: RunSpec) -> None:
    job = Job(run, CPU, {})
    tokens_BS, targets_BS = first_rows(run)
    with torch.no_grad():
        plain = float(plain_model(job)(tokens_BS, targets_BS))
        theirs = float(hf_model(job)(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS).loss)
    ours = our_losses(run, 1)[0]
    assert plain == pytest.approx(ours, rel=RTOL) and theirs == pytest.approx(ours, rel=RTOL)


def test_switching_techniques_off_does_not_change_what_is_computed(run: RunSpec) -> None:
    whole = our_losses(run, 3)
    assert our_losses(run, 3, ("attention", "loss", "optimizer")) == pytest.approx(whole, rel=RTOL)


def test_a_measured_step_has_rates_and_a_first_loss() -> None:
    with on_random_tokens(tiny_run("gqa")) as run:
        found = measure_step(run, seconds=0.001, warmup_steps=1)
    tokens = run.data.batch_tokens / found["step_seconds"]
    assert found["tokens_per_second"] == pytest.approx(tokens)
    strict = flops_per_token(run.model, run.data.sequence_length)
    assert found["teraflops"] == pytest.approx(tokens * strict / 1e12)
    assert 0 < found["first_loss"] < 20


def test_documents_have_the_mean_length_that_was_asked_for(tmp_path: Path) -> None:
    run = tiny_run("gqa", microbatch_sequences=2)
    with on_random_tokens(run, mean_tokens=300) as prepared:
        assert prepared.data.documents == "separate"
    ends = document_ends(1 << 20, 300, seed=0)
    lengths = np.diff(ends)
    # 3500 lengths with a deviation of 1.3 times the mean: their mean is within 10% by four sigma.
    assert abs(lengths.mean() - 299) < 30 and np.median(lengths) < 250 and lengths.max() > 2000
    with on_random_tokens(run) as prepared:
        assert prepared.data.documents == "joined"


def test_peers_keep_documents_separate_with_kernels_of_their_own(tmp_path: Path) -> None:
    options = program.parse(["--documents", "512", "--only", "ours,plain", "--precision", "bf16"])
    found = entries_of("1b", options, tmp_path)
    assert [entry.label for entry in found] == ["plain: compiled, fused AdamW, flex, 2 x 8", "ours"]
    assert {entry.run["data"]["documents"] for entry in found} == {"separate"}


def test_targets_at_document_ends_do_not_count_for_peers(tmp_path: Path) -> None:
    write_random_tokens(tmp_path / "tokens", vocab_size=50, num_tokens=400, mean_tokens=20)
    run = tiny_run()
    data = run.data.with_(path=str(tmp_path / "tokens"), synthetic=None, sequence_length=64)
    tokens, targets, positions = TokenRows(run.with_(data=data.with_(documents="separate")))[1]
    assert (targets[tokens == 0] == IGNORED).all() and (targets == IGNORED).sum() == (tokens == 0).sum()
    assert (positions[1:][tokens[:-1] == 0] == 0).all()


def test_every_setting_of_a_peer_makes_steps_of_the_same_tokens(tmp_path: Path) -> None:
    options = program.parse(["--case", "124m,1b", "--only", "ours,plain"])
    found = entries_of("1b", options, tmp_path)
    assert [entry.label for entry in found] == [
        "plain: compiled, fused AdamW, 2 x 8",
        "plain: compiled, fused AdamW, 4 x 4",
        "ours",
        "ours, fp8, end blocks in bf16, weights cast once a step",
        "ours, fp8, head alone in bf16, weights cast once a step",
    ]
    assert {entry.run["data"]["batch_sequences"] for entry in found} == {16}
    assert [entry.accumulation_factor for entry in found] == [None, None, 4, None, None]
    ends = [entry.run["precision"]["fp8"]["bf16_layers_each_end"] for entry in found[3:]]
    assert ends == [1, 0]
    # 2 x 8 sequences of a 1B model do not share the device with a second one that runs.
    assert found[2].peak_bytes > 60 * 2**30 > found[2].idle_bytes > found[0].built_bytes
    crowded = [entry.peer for entry in entries_of("8b", options, tmp_path)]
    assert crowded[:2] == ["ours", "plain"]  # one after the other in any case


def test_a_micro_batch_that_does_not_divide_the_step_is_not_tried(run: RunSpec) -> None:
    assert with_microbatch(run, 3) is None and with_microbatch(run, 0) is None
    other = with_microbatch(run, 1)
    assert other is not None and other.accumulation == 2


def test_absent_peers_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = program.parse(["--case", "tiny", "--only", "ours,lightning", "--precision", "bf16"])
    with patch("importlib.util.find_spec", return_value=None):
        assert [entry.label for entry in entries_of("tiny", options, tmp_path)] == ["ours"]
        assert "Lightning did not take part: pytorch_lightning not installed." in notes_of(options)
    assert "lightning: skipped" in capsys.readouterr().out


def test_the_ladder_climbs_one_rung_at_a_time(run: RunSpec) -> None:
    climbed = climb(run.with_(compile=True))
    gone = [len(missing) for _, missing in climbed]
    assert gone == list(range(len(rungs_of(run.with_(compile=True))), -1, -1))
    small = run.with_(precision=run.precision.with_(compute="bf16", weights="bf16_exact"))
    assert "optimizer" not in rungs_of(small) and "compile" not in rungs_of(small)


def test_a_ladder_is_measured_in_one_process(tmp_path: Path) -> None:
    arguments = ["--case", "tiny", "--device", "cpu", "--eager", "--seconds", "0.001", "--tokens", "4096"]
    options = ladder_options([*arguments, "--out", str(tmp_path)])
    assert measure_ladder(options) == 0
    rows = json.loads(next(tmp_path.glob("ladder_tiny_*.json")).read_text())["rows"]
    assert [row["label"].split(":")[0] for row in rows] == [
        "baseline",
        "+ attention",
        "+ loss",
        "+ optimizer",
        "+ fp8",
    ]
    # The same weights and tokens; fp8 has three bits of fraction.
    assert "| times the rung before |" in next(tmp_path.glob("ladder_tiny_*.md")).read_text()
    assert all(row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=5e-3) for row in rows)


def test_an_8b_run_has_ten_bytes_of_state_per_parameter(tmp_path: Path) -> None:
    options = program.parse(["--case", "8b", "--precision", "fp8", "--only", "ours"])
    made = RunSpec.model_validate(entries_of("8b", options, tmp_path)[0].run)
    assert (made.precision.weights, made.precision.gradients, made.optim.state) == (
        "bf16_exact",
        "bf16",
        "bf16",
    )
    assert made.precision.fp8 is not None


@pytest.mark.parametrize(
    ("arguments", "hint"), [(["--case", "9b"], "124m, 1b, 8b"), (["--only", "megatron"], "ours, hf")]
)
def test_an_unknown_name_is_refused_with_those_that_exist(arguments: list[str], hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        selected_contenders(program.parse(["--case", "tiny", *arguments]))
    assert hint in caught.value.hint


def test_losses_that_differ_are_found() -> None:
    rows = [
        {"first_loss": 10.0, "precision": "bf16"},
        {"first_loss": 10.005, "precision": "bf16"},
        {"first_loss": 10.04, "precision": "fp8"},
        {"error": "x"},
    ]
    assert losses_agree(rows)
    assert not losses_agree([*rows, {"first_loss": 10.02, "precision": "bf16"}])


def _row(label: str, teraflops: float, kind: str = "round") -> dict:
    return {
        "label": label, "peer": label.split(":")[0], "contender": label, "settings": {}, "kind": kind,
        "teraflops": teraflops, "tokens_per_second": 1.0,
        "step_seconds": 1.0, "p10_seconds": 0.9, "p90_seconds": 1.1, "attention_kernels": ["flash_fwd"],
        "compile_seconds": 1.0, "first_loss": 10.0, "kernel_seconds": {"matmul": 0.5},
        "device": "NVIDIA H200",
        "date": "2026-11-15", "torch": "2.11", "cuda": "13.0", "cudnn": 91900, "driver": "580.1",
    }  # fmt: skip


def test_rounds_become_one_row_and_a_page(tmp_path: Path, run: RunSpec) -> None:
    gone = {"label": "plain: eager", "peer": "plain", "settings": {}, "kind": "error", "error": "gone"}
    rows = [_row("ours", 500.0), _row("hf: compiled", 400.0), _row("ours", 510.0), gone]
    ours, theirs, failed = merged(rows)
    assert ours["teraflops"] == 505.0 and ours["rounds_apart"] == pytest.approx(10 / 505)
    assert theirs["rounds"] == 1 and failed["error"] == "gone"
    assert picture(merged(rows)).count("<rect") == 3
    summary = {
        "options": {"case": "1b", "precision": "all"},
        "run": run.model_dump(mode="json"),
        "versions": {"transformers": "5.0", "accelerate": None},
        "notes": ["Liger is absent."],
        "seconds": 3,
        "first_losses_agree": True,
        "rows": rows,
        "sweep": [_row("hf: compiled", 390.0, "sweep"), _row("hf: eager", 200.0, "sweep")],
    }
    write_results(summary, tmp_path)
    stem = tmp_path / "step_1b_h200_2026-11-15"
    page = stem.with_suffix(".md").read_text()
    assert "First losses agree: yes" in page and "| ours | 505 |" in page and "transformers 5.0" in page
    assert "Ours is 1.262 times the fastest peer, hf." in page and "driver 580.1" in page
    assert page.index("| hf: compiled | 390 |") < page.index("| hf: eager | 200 |")
    assert "| plain: eager | gone |" in page
    assert json.loads(stem.with_suffix(".json").read_text())["rows"][0]["teraflops"] == 500.0
