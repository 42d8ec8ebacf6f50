"""`plan` and `show` as a user meets them: tables, files, JSON, exit codes and errors without tracebacks."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.cli.plan import hours_text
from meshwright.spec.text import load_run

SMALL = ["plan", "llama-3.2-1b", "--seq", "2048", "--batch-tokens", "512K", "--tokens", "20B"]


def test_plan_prints_a_table_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--on", "h100:8"]) == 0
    output = capsys.readouterr()
    assert "tokens/s/GPU" in output.out
    assert "Why" in output.out
    assert "assumed: bf16 compute" in output.err


def test_plan_writes_a_run_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    assert run([*SMALL, "--on", "leonardo:2", "optim.lr=1e-3", "tp=2", "-o", str(file)]) == 0
    loaded = load_run(file)
    assert loaded.parallel.tp == 2
    assert loaded.optim.lr == 1e-3
    assert loaded.schedule.num_steps * loaded.data.batch_tokens >= 20e9
    assert f"wrote {file}" in capsys.readouterr().err
    every = loaded.checkpoint.every_steps
    assert every and f"checkpoint.every_steps={every}" in file.read_text(), "saved as often as the plan says"


def test_the_user_decides_how_often_a_planned_run_is_saved(tmp_path: Path) -> None:
    for value, expected in (("7", 7), ("null", None)):
        file = tmp_path / f"{value}.yaml"
        assert run([*SMALL, "--on", "h100:1", f"checkpoint.every_steps={value}", "-o", str(file)]) == 0
        assert load_run(file).checkpoint.every_steps == expected


def test_thousands_of_tokens_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama-3.2-1b", "--on", "h100:1", "--seq", "8k"]) == 0
    assert "--seq 8k is 8,000 tokens; 8Ki is 8,192" in capsys.readouterr().err


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("precious")
    for option in ("-o", "--report"):
        assert run([*SMALL, "--on", "h100:1", option, str(file)]) == 2
        said = capsys.readouterr().err
        assert "already exists" in said and "--force" in said and file.read_text() == "precious"
    assert run([*SMALL, "--on", "h100:1", "-o", str(file), "--force"]) == 0
    assert "schedule" in file.read_text()
    assert run([*SMALL, "--on", "h100:1", "--force"]) == 2
    assert "--force has no effect" in capsys.readouterr().err


def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--on", "h100:8", "--json", "--objective", "cost"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["objective"] == "cost"
    assert document["best"]["parallel"]["tp"] >= 1


def test_json_says_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama-3.1-8b", "--on", "h100:1", "memory.offload=[]", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert "does not fit on 1 x" in document["error"]["fact"]
    assert "any one of these" in document["error"]["hint"]


def test_deadline_gives_a_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL[:-1], "2T", "--on", "h100", "--deadline", "30d", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["days"] <= 30.5
    assert document["cluster"]["num_devices"] > 8


def test_report_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert run([*SMALL, "--on", "h100:8", "--report", str(file), "--price", "2"]) == 0
    assert file.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["plan", "llama-3.1-8b"], 2, "no cluster is given"),
        (["plan", "llama-3.1-8b", "--on", "h1000:8"], 2, "did you mean"),
        (["plan", "lama-3.1-8b", "--on", "h100:8"], 2, "llama-3.1-8b"),
        (["plan", "llama-3.1-8b", "--on", "h100:1", "memory.offload=[]"], 3, "devices instead of 1"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "tp=3"], 2, "does not divide num_heads"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "parallel.tpp=3"], 2, "tpp"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "--tokens", "many"], 2, "--tokens"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "--deadline", "soon"], 2, "--deadline"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "--objective", "sped"], 2, "'speed'"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "--price", "2"], 2, "no effect"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "-o", "/no/such/folder/run.yaml"], 2, "cannot write"),
        (["plan", "missing.yaml", "--on", "h100:8"], 2, "missing.yaml"),
        (["plan", "llama-3.1-8b", "--on", "h100:8", "--deadline", "1h", "--tokens", "1T"], 3, "at best"),
        (["show", "schedule", "--schedule", "zvb"], 2, "'zbv'"),
        (["show", "schedule", "--pp", "0"], 2, "at least 1"),
        (["show", "schedule", "--schedule", "1f1b", "--pp", "8", "--microbatches", "4"], 2, "at least pp=8"),
        (["show", "schedule", "none.yaml", "--pp", "2"], 2, "no effect"),
        (["show", "memory", "none.yaml"], 2, "--on"),
        (["show", "schedule", "demo", "parallel.pp=2", "parallel.tpp=1"], 2, "did you mean"),
        (["plan", "./none", "--on", "h100:8"], 2, "there is no folder './none'"),
        (["plan", "llama-3.2-1b", "--on", "h100:8", "--seq", "0"], 2, "use 1 to 16,777,216"),
    ],
)
def test_bad_input_is_reported(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    error = capsys.readouterr().err
    assert text in error
    assert "fault:" not in error


def test_show_draws_schedules_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "schedule.svg", tmp_path / "run.yaml"
    assert run(["show", "schedule", "--schedule", "zbv", "--pp", "2", "--svg", str(picture)]) == 0
    assert picture.read_text().startswith("<svg")
    assert "zbv: 2 ranks, 2 stages each, 8 micro-batches" in capsys.readouterr().out
    assert run([*SMALL, "--on", "h100:8", "pp=2", "-o", str(file)]) == 0
    assert run(["show", "schedule", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pp"] == 2
    assert run(["show", "memory", str(file), "--on", "h100:8"]) == 0
    assert "last stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hours", "text"), [(0.276, "0.28"), (9.31, "9.3"), (99.6, "100"), (12345.0, "12.3K")]
)
def test_device_hours_have_no_exponent(hours: float, text: str) -> None:
    assert hours_text(hours) == text
