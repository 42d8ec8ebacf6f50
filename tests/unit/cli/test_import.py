"""`meshwright import`."""

import json
from pathlib import Path

import pytest
from tests.support.golden_files import assert_golden

from meshwright.cli import main
from meshwright.spec.text import load_run

FILES = Path(__file__).parents[2] / "data/configs"
Captured = pytest.CaptureFixture[str]


def test_the_run_file_is_written_and_valid(tmp_path: Path, capsys: Captured):
    out = tmp_path / "run.yaml"
    file = str(FILES / "fsdp_leonardo.yaml")
    assert main.run(["import", file, "--onto", "llama-3.1-8b-8gpu", "-o", str(out), "seed=3"]) == 0
    assert "29 keys: 19 mapped, 10 changed, 0 refused" in capsys.readouterr().out
    assert load_run(out).seed == 3
    assert "# Imported from fsdp_leonardo.yaml (accelerate)" in out.read_text()
    assert "fsdp_config.fsdp_forward_prefetch=false" in out.read_text()


def test_without_a_file_the_run_is_data_and_the_table_is_not(capsys: Captured):
    assert main.run(["import", str(FILES / "zero3_fp16.json"), "--onto", "llama-3.1-8b-8gpu"]) == 0
    captured = capsys.readouterr()
    assert "version: 2" in captured.out
    assert "hysteresis=2" in captured.err


def test_refused_keys_stop_the_import_and_nothing_is_written(tmp_path: Path, capsys: Captured):
    out = tmp_path / "run.yaml"
    words = ["import", str(FILES / "refused.json"), "--onto", "llama-3.1-8b-8gpu", "-o", str(out)]
    assert main.run(words) == 2
    assert "7 keys cannot be mapped: optimizer.type" in capsys.readouterr().err
    assert not out.exists()
    assert main.run([*words, "--skip-refused"]) == 0
    assert "refused  optimizer.type=OneBitAdam" in out.read_text()


def test_json_names_every_key(capsys: Captured):
    words = ["import", str(FILES / "refused.json"), "--onto", "llama-3.1-8b-8gpu", "--json"]
    assert main.run(words) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["run"] is None
    assert {entry["status"] for entry in document["keys"]} == {"mapped", "changed", "refused"}
    assert main.run([*words, "--skip-refused"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["parallel"]["zero"] == 3


def test_the_table(capsys: Captured):
    assert main.run(["import", str(FILES / "zero3_fp16.json"), "--onto", "llama-3.1-8b-8gpu"]) == 0
    assert_golden("configs/zero3_fp16.txt", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing.json"], "cannot be read"),
        ([str(FILES / "fsdp2.yaml"), "--from", "axolotl"], "there is no format 'axolotl'"),
        ([str(FILES / "fsdp2.yaml")], "--onto RUN"),
        ([str(FILES / "fsdp2.yaml"), "--onto", "lama"], "there is no file 'lama'"),
    ],
)
def test_wrong_input_exits_2(words: list[str], text: str, capsys: Captured):
    assert main.run(["import", *words]) == 2
    assert text in capsys.readouterr().err
