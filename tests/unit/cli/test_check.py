"""`meshwright check`."""

import json
from pathlib import Path

import pytest
from tests.support.chat_templates import FAMILIES, write_tokenizer
from tests.support.golden_files import assert_golden
from tests.support.run_files import DENSE

from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(DENSE)
    return "run.yaml"


def test_a_valid_run_is_summed_up(run_file: str, capsys: Captured):
    assert run(["check", run_file, "parallel.dp_shard=4", "parallel.zero=2"]) == 0
    assert_golden("errors/check_valid.txt", capsys.readouterr().out)


def test_everything_wrong_at_once(run_file: str, capsys: Captured):
    assert (
        run(
            [
                "check",
                run_file,
                "parallel.tp=8",
                "schedule.warmup_steps=1K",
                "optim.kind=sgd",
                "optim.eps=1e-6",
            ]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_golden("errors/check_invalid.txt", captured.err)


def test_origins_of_every_value(run_file: str, capsys: Captured):
    assert run(["check", run_file, "seed=3", "--origins"]) == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["seed"] == ["3", "command line"]
    assert lines["model.width"] == ["64", "file run.yaml:5"]
    assert lines["optim.lr"] == ["0.0003", "default"]


def test_json_of_a_valid_run(run_file: str, capsys: Captured):
    assert run(["check", run_file, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is True
    assert document["run"]["model"]["width"] == 64
    assert document["origins"]["model.width"] == "file run.yaml:5"


def test_json_of_a_broken_run(run_file: str, capsys: Captured):
    assert run(["check", run_file, "parallel.tp=8", "--json"]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["valid"] is False
    assert document["violations"][0]["where"] == "command line parallel.tp"


def test_a_missing_file(capsys: Captured):
    assert run(["check", "nowhere.yaml"]) == 2
    assert "there is no file 'nowhere.yaml'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["-", "/dev/null", ""])
def test_what_is_no_file_is_not_called_missing(name: str, capsys: Captured):
    assert run(["check", name]) == 2
    error = capsys.readouterr().err
    assert "there is no file" not in error and "hint:" in error


def test_bytes_that_are_no_text(tmp_path: Path, capsys: Captured):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\x00\xff\xfe")
    assert run(["check", str(file)]) == 2
    assert "byte 1 is not UTF-8" in capsys.readouterr().err


def test_an_unknown_mapping_of_the_command_line_is_not_looked_for_in_the_file(
    run_file: str, capsys: Captured
):
    assert run(["check", run_file, "model.attn.num_heads=2", "device=gpu"]) == 2
    error = capsys.readouterr().err
    assert "where: command line model.attn" in error
    assert "did you mean 'cuda'?" in error


def test_weights_that_are_missing_and_data_of_another_tokenizer_are_shown(
    run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    """A folder on another machine is no error: `check` may run where the weights are not."""
    qwen, mistral = (
        write_tokenizer(tmp_path / family.name, family, template=None) for family in FAMILIES[1:3]
    )
    Path("text.txt").write_text("What is the capital of France? " * 40)
    assert run(["data", "pack", "text.txt", "-o", "packed", "--tokenizer", str(qwen)]) == 0
    capsys.readouterr()
    settings = ["data.path=packed", "data.synthetic=null", "model.vocab_size=1024"]
    assert run(["check", run_file, *settings, f"checkpoint.start_from={mistral}"]) == 0
    printed = capsys.readouterr().out
    assert f"weights   from {mistral}\n" in printed
    assert f"packed with another tokenizer than that of {mistral}" in printed
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["check", run_file, *settings, f"checkpoint.start_from=~/{mistral.name}"]) == 0
    printed = capsys.readouterr().out
    assert f"weights   from ~/{mistral.name}\n" in printed
    assert f"packed with another tokenizer than that of ~/{mistral.name}" in printed
    adapter = ["adapter.rank=2", "adapter.alpha=2", "adapter.start_from=adapters"]
    assert run(["check", run_file, *adapter, "checkpoint.start_from=nowhere"]) == 0
    printed = capsys.readouterr().out
    assert "from nowhere, which is not there" in printed
    assert "all-linear, from adapters, which is not there" in printed
