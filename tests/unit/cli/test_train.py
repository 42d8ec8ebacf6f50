"""`meshwright train`: runs, stops, resumes, and refuses what it must with fact, where and hint."""

import hashlib
import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
from tests.support.run_files import TRAINABLE, train_run_file, write_run_file

from meshwright.checkpoint import save
from meshwright.cli.main import run
from meshwright.observe.events import read_events
from meshwright.observe.metrics import read_metrics
from meshwright.observe.summary import read_summary
from meshwright.train import loop

Captured = pytest.CaptureFixture[str]
MODEL = TRAINABLE["model"]
assert isinstance(MODEL, dict)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run_file(tmp_path_factory.mktemp("trained"))


def refusal(arguments: list[str], capsys: Captured) -> tuple[str, str, str]:
    """Fact, where and hint of a command that must be refused in just these three lines."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 3, captured.err
    assert (
        lines[0].startswith("error: ")
        and lines[1].startswith("  where: ")
        and lines[2].startswith("  hint:  ")
    )
    return lines[0][7:], lines[1][9:], lines[2][9:]


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_leaves_its_files(trained: Path):
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "run.yaml",
        "metrics.jsonl",
        "metrics.index",
        "events-0.jsonl",
        "summary.json",
        "checkpoints",
    }
    losses = [row["loss"] for row in read_metrics(trained)]
    assert len(losses) == 4 and losses[-1] < losses[0] < math.log(MODEL["vocab_size"]) + 0.5


def test_stop_after_then_the_same_command_gives_the_same_run(trained: Path, tmp_path: Path):
    file = write_run_file(tmp_path / "run.yaml")
    command = ["train", file, "--dir", str(tmp_path / "run")]
    assert run([*command, "--stop-after", "2"]) == 0
    assert read_summary(tmp_path / "run")["outcome"] == "interrupted"
    assert len(read_metrics(tmp_path / "run")) == 2
    assert run(command) == 0
    assert read_summary(tmp_path / "run")["outcome"] == "finished"
    assert run(["compare", str(trained), str(tmp_path / "run"), "--assert-equal"]) == 0


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the second step."""
    seed_step = loop.seed_step

    def seed_and_press(seed: int, number: int) -> None:
        seed_step(seed, number)
        if number == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "seed_step", seed_and_press)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_saves_and_prints_it(trained: Path, tmp_path: Path, capsys: Captured):
    file = write_run_file(tmp_path / "run.yaml")
    command = ["train", file, "--dir", str(tmp_path / "run")]
    assert run(command) == 130
    assert "stopped at step 2 of 4, which is saved" in capsys.readouterr().err
    assert run(command) == 0
    assert run(["compare", str(trained), str(tmp_path / "run"), "--assert-equal"]) == 0


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_that_cannot_save_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_shard_file", refuse)
    file = write_run_file(tmp_path / "run.yaml")
    assert run(["train", file, "--dir", str(tmp_path / "run")]) == 4
    printed = capsys.readouterr().err
    assert (
        "the last save failed: rank 0: OSError: No space left on device" in printed
        and "which is saved" not in printed
    )


def test_start_from_takes_weights_only(trained: Path, tmp_path: Path):
    changed = train_run_file(tmp_path, f"checkpoint.start_from={trained}", "schedule.num_steps=2")
    rows = read_metrics(changed)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["loss"] < read_metrics(trained)[1]["loss"], "the loaded weights know something already"


def test_finished_run_again_does_nothing_new(trained: Path, tmp_path: Path, capsys: Captured):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    before = (copy / "metrics.jsonl").read_bytes()
    assert run(["train", str(copy / "run.yaml"), "--dir", str(copy)]) == 0
    assert (copy / "metrics.jsonl").read_bytes() == before
    assert capsys.readouterr().err.startswith("already finished: this directory has all 4 steps")


def test_missing_run_file(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_run_file(tmp_path / "mine.yaml")
    fact, where, hint = refusal(["train", "nine.yaml"], capsys)
    assert fact == "there is no file 'nine.yaml'" and where == "nine.yaml" and "mine.yaml" in hint


def test_unreadable_yaml(tmp_path: Path, capsys: Captured):
    file = tmp_path / "run.yaml"
    file.write_text("model: [1, 2\nname: x\n")
    fact, where, hint = refusal(["train", str(file)], capsys)
    assert str(file) in where and fact and hint


def test_unknown_family(tmp_path: Path, capsys: Captured):
    file = write_run_file(tmp_path / "run.yaml", model="llama-3.1-8c")
    fact, where, hint = refusal(["train", file], capsys)
    assert "llama-3.1-8c" in fact and "model" in where and "llama-3.1-8b" in hint


def test_missing_dataset(tmp_path: Path, capsys: Captured):
    data = {"path": str(tmp_path / "none"), "sequence_length": 32, "batch_sequences": 4}
    file = write_run_file(tmp_path / "run.yaml", data=data)
    fact, where, hint = refusal(["train", file, "--dir", str(tmp_path / "out")], capsys)
    assert fact == "there is no dataset here" and where == str(tmp_path / "none") and "data pack" in hint


def test_vocabulary_of_data_and_model_differ(tmp_path: Path, capsys: Captured):
    (tmp_path / "text.txt").write_text("Some words that are packed as bytes.\n" * 20)
    packed = str(tmp_path / "packed")
    assert run(["data", "pack", str(tmp_path / "text.txt"), "-o", packed]) == 0
    capsys.readouterr()
    data = {"path": packed, "sequence_length": 32, "batch_sequences": 4}
    file = write_run_file(tmp_path / "run.yaml", data=data, model={**MODEL, "vocab_size": 200})
    fact, where, hint = refusal(["train", file, "--dir", str(tmp_path / "out")], capsys)
    assert "257" in fact and "200" in fact and where == packed and "model.vocab_size" in hint


def test_dataset_shorter_than_one_sequence(tmp_path: Path, capsys: Captured):
    data = {"synthetic": {"num_documents": 1}, "sequence_length": 4096, "batch_sequences": 4}
    file = write_run_file(tmp_path / "run.yaml", data=data, model={**MODEL, "max_positions": 4096})
    fact, where, hint = refusal(["train", file, "--dir", str(tmp_path / "out")], capsys)
    assert "fewer than one sequence" in fact and "1 documents" in where and "data.sequence_length" in hint


def test_directory_that_cannot_be_made(tmp_path: Path, capsys: Captured):
    (tmp_path / "out").write_text("in the way")
    file = write_run_file(tmp_path / "run.yaml")
    fact, where, hint = refusal(["train", file, "--dir", str(tmp_path / "out" / "run")], capsys)
    assert "cannot be written" in fact and where == str(tmp_path / "out" / "run") and "--dir" in hint
    assert (tmp_path / "out").read_text() == "in the way"


def test_another_run_in_the_same_directory_is_refused(trained: Path, tmp_path: Path, capsys: Captured):
    file, before = write_run_file(tmp_path / "run.yaml", seed=5), content(trained)
    fact, where, hint = refusal(["train", file, "--dir", str(trained)], capsys)
    assert fact.startswith("this directory has another run: seed was 0, is 5 (the order of samples")
    assert where == str(trained) and "--dir" in hint
    assert content(trained) == before


def test_fewer_steps_than_are_trained_are_refused(trained: Path, capsys: Captured):
    file, before = str(trained.parent / "run.yaml"), content(trained)
    command = ["train", file, "schedule.num_steps=3", "--dir", str(trained)]
    fact, where, hint = refusal(command, capsys)
    assert fact == "this run has 4 steps already, schedule.num_steps is 3"
    assert where == str(trained) and "above 4" in hint
    assert content(trained) == before


def test_a_finished_run_says_so_and_its_directory_stays_as_it_is(trained: Path, capsys: Captured):
    file, before = str(trained.parent / "run.yaml"), content(trained)
    assert run(["train", file, "--dir", str(trained)]) == 0
    said = capsys.readouterr().err
    assert said.startswith("already finished: this directory has all 4 steps; a larger schedule.num_steps")
    assert run(["train", file, "optim.lr=0.5", "--dir", str(trained)]) == 0
    assert "without effect: optim.lr was 0.01, is 0.5" in capsys.readouterr().err
    assert run(["train", file, "--dir", str(trained), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"directory": str(trained), **read_summary(trained)}
    assert content(trained) == before


def test_a_run_prints_where_and_on_what_it_trains_and_its_evaluation_losses(tmp_path: Path, capsys: Captured):
    data = {**TRAINABLE["data"], "holdout_sequences": 2}
    file = write_run_file(tmp_path / "run.yaml", data=data, observe={"evaluate": {"every_steps": 2}})
    command = ["train", file, "--dir", str(tmp_path / "run")]
    assert run([*command, "--stop-after", "2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r".*/run: [0-9.]+K parameters, cpu, one device, 4 micro-batches per step", lines[0])
    loss = read_metrics(tmp_path / "run")[-1]["eval_loss"]
    assert f"step 2: evaluation loss {loss:.4f}" in lines
    assert run([*command, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_shrunken_family_says_what_to_set(tmp_path: Path, capsys: Captured):
    model = {"family": "llama-3.2-1b", "num_layers": 1, "width": 64, "vocab_size": 257}
    file = write_run_file(tmp_path / "run.yaml", model=model, schedule={"num_steps": 1})
    assert run(["train", file, "--dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert said.startswith("note: width=64 with attention.num_heads=32") and "model.mlp.width=256" in said


def test_a_run_goes_on_with_other_settings(tmp_path: Path, capsys: Captured):
    """More steps and another learning rate: the first steps stay, and events and report name the change."""
    directory = train_run_file(tmp_path)
    first = read_metrics(directory)
    command = ["train", str(tmp_path / "run.yaml"), "schedule.num_steps=6", "optim.lr=0.005"]
    assert run([*command, "--dir", str(directory)]) == 0
    said = capsys.readouterr().err
    assert "resumed at step 4" in said and "changed: optim.lr was 0.01, is 0.005" in said
    assert (
        "changed: schedule.num_steps was 4, is 6" in said and "the learning rate of the next step is" in said
    )
    rows = read_metrics(directory)
    assert rows[:4] == first and [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    changes = [event for event in read_events(directory / "events-0.jsonl") if event["kind"] == "change"]
    assert [(one["step"], one["setting"], one["old"], one["new"]) for one in changes] == [
        (4, "optim.lr", "0.01", "0.005"),
        (4, "schedule.num_steps", "4", "6"),
    ]
    capsys.readouterr()
    assert run(["report", str(directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0] == {"step": 4, "setting": "optim.lr", "old": "0.01", "new": "0.005"}
    page = (directory / "report.html").read_text()
    assert "from step 4 on: optim.lr was 0.01, is 0.005" in page
    assert "num_steps: 6" in (directory / "run.yaml").read_text()


def test_checkpoint_of_another_model_is_not_resumed(trained: Path, tmp_path: Path, capsys: Captured):
    """Even where nothing but the checkpoints is left of the other run."""
    copy = tmp_path / "run"
    shutil.copytree(trained / "checkpoints", copy / "checkpoints")
    file = write_run_file(tmp_path / "run.yaml", model={**MODEL, "num_layers": 1})
    before = content(copy)
    fact, where, hint = refusal(["train", file, "--dir", str(copy)], capsys)
    assert "model.num_layers was 2, is 1" in fact and "step-00000004" in where and "start_from" in hint
    assert {name: value for name, value in content(copy).items() if "checkpoints" in name} == before


def test_weights_of_another_model_are_refused(trained: Path, tmp_path: Path, capsys: Captured):
    changes = {"checkpoint": {"start_from": str(trained)}, "model": {**MODEL, "width": 128}}
    file = write_run_file(tmp_path / "run.yaml", **changes)
    fact, where, _ = refusal(["train", file, "--dir", str(tmp_path / "out")], capsys)
    assert "model.width is 64 there and 128 here" in fact and "step-00000004" in where


def test_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path, capsys: Captured):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    [shard] = copy.glob("checkpoints/*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-7])
    assert run(["train", str(copy / "run.yaml"), "--dir", str(copy)]) == 2
    note, fact, where, hint = capsys.readouterr().err.strip().splitlines()
    assert note.startswith("note: ") and "step-00000004 is damaged and skipped" in note
    assert "differs from the manifest" in fact and "step-00000004" in where and "older checkpoint" in hint
