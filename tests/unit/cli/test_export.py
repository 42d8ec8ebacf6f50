"""`meshwright export`."""

import json
from pathlib import Path

import pytest
import yaml
from tests.support.golden_files import assert_golden

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("to", ["accelerate", "deepspeed"])
def test_the_file(to: str, capsys: Captured):
    assert main.run(["export", "llama-3.1-8b-8gpu", "--to", to]) == 0
    captured = capsys.readouterr()
    assert_golden(f"configs/{to}.{'yaml' if to == 'accelerate' else 'json'}", captured.out)
    assert_golden(f"configs/{to}_export.txt", captured.err)


def test_the_file_is_written(tmp_path: Path, capsys: Captured):
    out = tmp_path / "a.yaml"
    assert main.run(["export", "llama-3.1-8b-8gpu", "-o", str(out), "--nodes", "2"]) == 0
    assert yaml.safe_load(out.read_text())["num_machines"] == 2
    assert "keys: " in capsys.readouterr().out


def test_a_layout_that_cannot_be_said_stops_the_export(tmp_path: Path, capsys: Captured):
    words = ["export", "qwen3-30b-a3b-16gpu", "parallel.ep=2", "-o", str(tmp_path / "a.yaml")]
    assert main.run(words) == 2
    assert "1 keys cannot be mapped: parallel.ep" in capsys.readouterr().err
    assert not (tmp_path / "a.yaml").exists()
    assert main.run([*words, "--skip-refused"]) == 0


def test_json(capsys: Captured):
    assert main.run(["export", "llama-3.1-8b-8gpu", "--json", "--to", "deepspeed"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"]["zero_optimization"]["stage"] == 3


def test_an_unknown_format(capsys: Captured):
    assert main.run(["export", "demo", "--to", "fairscale"]) == 2
    assert "accelerate or deepspeed" in capsys.readouterr().err
