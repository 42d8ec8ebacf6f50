"""`meshwright evaluate`: the loss of a checkpoint on the run's own holdout and on any dataset."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_files import TRAINABLE, write_run_file

from meshwright.cli.main import run
from meshwright.data.byte_tokenizer_file import byte_tokenizer_json
from meshwright.observe.metrics import read_metrics

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    file = write_run_file(
        folder / "run.yaml",
        data={**TRAINABLE["data"], "holdout_sequences": 5},
        checkpoint={"every_steps": 2},
        observe={"evaluate": {"every_steps": 2}},
    )
    assert run(["train", file, "--dir", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("once upon a time there was a fox and a crow\n" * 40)
    assert run(["data", "pack", str(folder / "text.txt"), "-o", str(folder / "packed")]) == 0
    return str(folder / "packed")


def evaluated(arguments: list[str], capsys: Captured) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_holdout_of_the_run_gives_the_loss_that_training_recorded(trained: Path, capsys: Captured):
    losses = {row["step"]: row["eval_loss"] for row in read_metrics(trained) if "eval_loss" in row}
    assert set(losses) == {2, 4}
    for step, loss in losses.items():
        document = evaluated([str(trained), "--checkpoint", str(step)], capsys)
        assert (document["loss"], document["step"], document["sequences"]) == (loss, step, 5)
        assert document["perplexity"] == math.exp(document["loss"])
    newest = evaluated([str(trained)], capsys)
    assert newest["step"] == 4 and newest["loss"] == losses[4]


def test_a_dataset_is_evaluated_in_full(trained: Path, dataset: str, capsys: Captured):
    document = evaluated([str(trained), "--data", dataset], capsys)
    num_sequences = (44 * 40 + 1 - 1) // 32
    assert document["sequences"] == num_sequences and document["data"] == dataset
    assert 0 < document["tokens"] <= num_sequences * 32 and math.isfinite(document["loss"])
    averaged = evaluated([str(trained), "--data", dataset, "--ema"], capsys)
    assert averaged["loss"] != document["loss"]
    shorter = evaluated([str(trained), "data.sequence_length=16", "--data", dataset], capsys)
    assert shorter["sequences"] == (44 * 40) // 16
    capsys.readouterr()
    assert run(["evaluate", str(trained), "--data", dataset]) == 0
    captured = capsys.readouterr()
    assert (
        captured.out.startswith(f"loss {document['loss']:.6f}, perplexity ") and "step-0000" in captured.err
    )
    assert run(["evaluate", str(trained), "--data", dataset, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_hugging_face_folder_is_evaluated(trained: Path, dataset: str, tmp_path: Path, capsys: Captured):
    folder = str(tmp_path / "exported")
    assert run(["convert", str(trained), folder]) == 0
    here = evaluated([str(trained), "device=cpu", "--data", dataset], capsys)
    there = evaluated([folder, "device=cpu", "data.sequence_length=32", "--data", dataset], capsys)
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5) and there["step"] is None


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--checkpoint", "3"], "there is no checkpoint of step 3"),
        (["optim.lrr=1"], "lrr"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_bad_input_is_refused(trained: Path, capsys: Captured, options: list[str], fact: str):
    capsys.readouterr()
    assert run(["evaluate", str(trained), *options]) == 2
    captured = capsys.readouterr()
    assert fact in captured.err and captured.out == ""


def test_a_dataset_of_another_tokenizer_is_refused(trained: Path, tmp_path: Path, capsys: Captured):
    (tmp_path / "text.txt").write_text("the fox and the crow\n" * 60)
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer_json())
    pack = ["data", "pack", str(tmp_path / "text.txt"), "-o", str(tmp_path / "packed")]
    assert run([*pack, "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0
    capsys.readouterr()
    assert run(["evaluate", str(trained), "--data", str(tmp_path / "packed")]) == 2
    assert "the run was trained on tokens of bytes" in capsys.readouterr().err


def test_a_run_without_holdout_needs_a_dataset(tmp_path: Path, capsys: Captured):
    file = write_run_file(tmp_path / "run.yaml", schedule={"num_steps": 1})
    assert run(["train", file, "--dir", str(tmp_path / "run"), "-q"]) == 0
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run")]) == 2
    assert "--data PATH" in capsys.readouterr().err
