"""`meshwright compare` with weights, and with run files that are run first."""

import json
from pathlib import Path

import pytest
from tests.support.run_files import train_run_file, write_run_file

from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    train_run_file(folder, "checkpoint.every_steps=2", name="a")
    train_run_file(folder, "seed=1", name="b")
    return folder


def compared(capsys: Captured, *arguments: str) -> dict[str, dict[str, float]]:
    assert run(["compare", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return {row["name"]: row for row in document["differences"]}


def test_weights_of_different_runs_differ(folder: Path, capsys: Captured):
    rows = compared(capsys, str(folder / "a"), str(folder / "b"))
    weights = rows["weights at step 4"]
    # Two layers of nine tensors, embedding, norm and head.
    assert weights["num_compared"] == 2 * 9 + 3
    assert weights["num_different"] > 10 and 0.1 < weights["max_relative"] < 2


def test_weights_can_be_left_out(folder: Path, capsys: Captured):
    assert "weights at step 4" not in compared(capsys, str(folder / "a"), str(folder / "b"), "--no-weights")


def test_a_run_file_is_run_first(folder: Path, tmp_path: Path, capsys: Captured):
    """Two steps of the same run, in a process of its own, equal those of the directory bit for bit."""
    file = write_run_file(tmp_path / "same.yaml")
    assert run(["compare", str(folder / "a"), file, "--steps", "2", "--assert-equal"]) == 0
    printed = capsys.readouterr().out
    assert "2 shared steps, equal bit for bit" in printed and "weights at step 2" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same.yaml"], "its directory has gone away"


def test_no_common_checkpoint_is_printed(folder: Path, capsys: Captured):
    assert run(["compare", str(folder / "a"), str(folder / "b"), "--steps", "3"]) == 0
    assert "the runs have no checkpoint of the same step" in capsys.readouterr().err


def test_a_run_file_that_fails_is_an_error(folder: Path, tmp_path: Path, capsys: Captured):
    file = write_run_file(
        tmp_path / "wrong.yaml", data={"path": "none", "sequence_length": 8, "batch_sequences": 1}
    )
    assert run(["compare", str(folder / "a"), file]) == 4
    assert "the run ended with exit code 2" in capsys.readouterr().err
