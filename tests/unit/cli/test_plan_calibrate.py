"""`plan --calibrate` end to end: a real tiny run on this CPU, the profile, and predictions with it."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run as command
from meshwright.hardware import cluster_of
from meshwright.plan.predict import predict_run
from meshwright.spec.text import load_run

TINY = ["parallel.dp_replicate=1", "schedule.num_steps=6", "schedule.warmup_steps=1", "model.num_layers=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as ended:
        from meshwright.cli.train import train

        train("demo", TINY, directory=folder, quiet=True)
    assert ended.value.code == 0
    return folder


def test_a_run_on_this_cpu_makes_the_next_prediction_exact(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["plan", "--calibrate", str(trained)]) == 0
    out = capsys.readouterr().out
    assert "median error of the step time" in out and "-> 0.0%" in out
    profile = json.loads(Path("machine.json").read_text())
    assert profile["device"] == "cpu" and profile["calibration"]["num_runs"] == 1
    run = load_run(trained / "run.yaml")
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(row["step_seconds"] for row in rows[1:])
    predicted = predict_run(run, cluster_of("machine.json:1"))
    assert predicted.step_seconds == pytest.approx(seconds[len(seconds) // 2], rel=1e-3)
    # Fitted again on top of itself, nothing changes.
    assert (
        command(["plan", "--calibrate", str(trained), "--on", "machine.json", "-o", "again.json", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"]["compute"] == pytest.approx(1.0, rel=1e-3)
    again = json.loads(Path("again.json").read_text())
    assert again["calibration"]["compute"] == pytest.approx(profile["calibration"]["compute"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none"], "is no run directory"),
        (["."], "is no run directory"),
        (["none", "--seq", "8"], "no effect with --calibrate"),
        (["none", "-o", "old.json"], "already exists"),
    ],
)
def test_refusals(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text("{}")
    assert command(["plan", "--calibrate", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_run_with_too_few_steps_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text((trained / "run.yaml").read_text())
    lines = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    assert command(["plan", "--calibrate", str(tmp_path), "-o", str(tmp_path / "m.json")]) == 2
    assert "2 measured steps" in capsys.readouterr().err
