"""`bench` and `hardware probe` as a person and as a program use them, on a CPU."""

import io
import json
from pathlib import Path

import pytest
from tests.support.run_files import write_run_file

from meshwright.bench import copy, gemm
from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copy.MEMORY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(gemm.TOKENS, "cpu", 8)


def test_rows_are_shown_and_written(tmp_path: Path, capsys: Captured) -> None:
    words = ["bench", "gemm", "--section", "widths", "--device", "cpu", "--seconds", "0.001"]
    assert run([*words, "-o", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "TFLOP/s" in out and "####" in out and "written:" in out
    assert (tmp_path / "gemm_widths.svg").exists() and (tmp_path / "gemm.md").exists()


@pytest.mark.parametrize("verb", ["copy", "attention", "data"])
def test_json_is_one_document_on_stdout(verb: str, capsys: Captured) -> None:
    assert run(["bench", verb, "--device", "cpu", "--seconds", "0.001", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["bench"] == verb and document["torch"] and all(document["sections"].values())
    assert "torch" in err  # rows are talk here, and so a sign of progress


def test_checkpoints(tmp_path: Path, capsys: Captured) -> None:
    words = ["bench", "checkpoint", "--dir", str(tmp_path), "--size", "64KiB", "--device", "cpu"]
    assert run(words) == 0
    assert "MB/s" in capsys.readouterr().out


def test_a_step_of_a_run_file(tmp_path: Path, capsys: Captured) -> None:
    file = write_run_file(tmp_path / "run.yaml")
    assert run(["bench", "step", file, "--seconds", "0.01", "--warmup-steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "TFLOP/s" in out and "tokens" in out


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["bench", "gemm", "--section", "width"], "--section"),
        (["bench", "copy", "--device", "tpu"], "--device"),
        (["bench", "copy", "--device", "cuda"], "device"),
        (["bench", "checkpoint", "--size", "big"], "--size"),
        (["bench", "checkpoint", "--size", "1"], "--size"),
        (["bench", "data", "nowhere"], "nowhere"),
        (["bench", "step", "nowhere.yaml"], "nowhere.yaml"),
        (["bench", "step", "llama-3.1-8b-8gpu"], "parallel"),
        (["hardware", "probe", "--device", "tpu"], "--device"),
    ],
)
def test_bad_input_is_refused_with_its_place(arguments: list[str], where: str, capsys: Captured) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and where in err, (out, err)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(capsys: Captured) -> None:
    assert run(["bench", "copy", "--device", "cpu", "-o", "/dev/null"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "where: /dev/null" in err


def test_a_probe_writes_a_profile_and_shows_it_beside_the_catalogue(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "machine.json"
    assert run(["hardware", "probe", "-o", str(path), "--device", "cpu", "--seconds", "0.001"]) == 0
    out, _ = capsys.readouterr()
    assert "memory, TB/s" in out and json.loads(path.read_text())["device"] == "cpu"
    assert run(["hardware", "compare", str(path)]) == 0
    assert "measured on" in capsys.readouterr().out


def test_a_profile_that_cannot_be_written_is_refused(tmp_path: Path, capsys: Captured) -> None:
    words = ["hardware", "probe", "-o", str(tmp_path), "--device", "cpu", "--seconds", "0.001"]
    assert run(words) == 2
    told = capsys.readouterr().err
    assert "cannot be written" in told and "measuring" not in told


@pytest.mark.soak
def test_a_probe_of_two_ranks_knows_their_link(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "machine.json"
    words = ["hardware", "probe", "-o", str(path), "--device", "cpu", "--seconds", "0.001", "--ranks", "2"]
    assert run(words) == 0
    kinds = {row["kind"] for row in json.loads(path.read_text())["collectives"]}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert "peer link, GB/s" in capsys.readouterr().out


def test_more_ranks_than_cores_are_refused_without_a_terminal(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(["bench", "comm", "--ranks", "999"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: 999 ranks on ") and "--yes" in said
