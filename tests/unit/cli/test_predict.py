"""`predict` as a person and as a program use it."""

import csv
import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.hardware.prediction_log import Pair, store_pair

RECIPE = "llama-3.1-8b-8gpu"
TABLE = Path(__file__).parents[2] / "data" / "published_runs.csv"


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_on_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(["predict", RECIPE, "--on", "h100:8"], capsys)
    assert code == 0
    assert err.startswith("assumed: separate documents of") and err.count("\n") == 1
    for word in ("step", "90%", "MFU", "matmul", "allocated", "reserved", "fits NVIDIA H100"):
        assert word in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["predict", RECIPE, "--on", "h100:8", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["step_seconds"] == pytest.approx(sum(found["seconds_by_item"].values()))
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert (
        found["memory"][0]["allocated_bytes"] < found["memory"][0]["device_bytes"] < found["capacity_bytes"]
    )


def test_what_does_not_fit_exits_three_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", RECIPE, "memory.recompute=none", "data.microbatch_sequences=2", "--on", "h100:8"]
    code, out, err = _run(arguments, capsys)
    assert code == 3
    assert re.search(r"does NOT fit NVIDIA H100.*: \d.* too much", out)
    assert "any one of these fits:\n  - " in err
    assert re.search(r"memory.recompute=full \(\d.* per device, \d.* per step\)", err)


def test_observed_errors_are_printed_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", RECIPE, "--on", "h100:8"]
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    _, before, silence = _run(arguments, capsys)
    store_pair(Pair("h100", "a", "one device", 1, "bf16", 2.0, 3.0, 1.0, 1.25))
    _, after, observed = _run(arguments, capsys)
    assert "observed" not in silence
    assert "1 run here needed 1.50 x the predicted memory and 1.25 x the predicted time" in observed
    assert after == before


def test_a_table_gains_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.csv"
    code, out, err = _run(["predict", "--table", str(TABLE), "-o", str(output)], capsys)
    assert (code, out) == (0, "")
    assert "rows predicted" in err
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 323
    assert all(bool(row["pred_step_time_s"]) != bool(row["error"]) for row in rows)
    assert all(row["error"].startswith("row ") for row in rows if row["error"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "one of them"),
        ([RECIPE], "--on"),
        ([RECIPE, "--on", "h100:16"], "8 ranks"),
        ([RECIPE, "--on", "h1000:8"], "did you mean 'h100'"),
        ([RECIPE, "--on", "h100:8", "-o", "x.csv"], "no effect"),
        (["--table", "rows.csv", "--on", "h100:8"], "no effect"),
        (["--table", "rows.csv"], "cannot read rows.csv: No such file or directory\n"),
        ([RECIPE, "--on", "h100:8", "--profile", "none.json"], "cannot read none.json: No such file"),
        ([RECIPE, "--on", "h100:8", "--profile", __file__], "it is not JSON (line 1: "),
        ([RECIPE, "parallel.tp=3", "--on", "h100:8"], "tp=3"),
    ],
)
def test_a_wrong_question_is_an_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(["predict", *arguments], capsys)
    assert (code, out) == (2, "")
    assert text in err
