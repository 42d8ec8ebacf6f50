"""`meshwright demo`, on a model so small that two starts of two ranks are most of its time."""

import json
from pathlib import Path

import pytest

from meshwright.cli import demo
from meshwright.cli.main import run
from meshwright.data.corpus import generated_tokens, unigram_entropy
from meshwright.launch.attempt import AttemptEnd
from meshwright.observe.metrics import read_metrics
from meshwright.spec import SyntheticSpec

Captured = pytest.CaptureFixture[str]
SMALL = [
    "model.num_layers=1",
    "model.width=32",
    "model.attention={num_heads: 2, num_kv_heads: 1, head_width: 16}",
    "model.mlp.width=48",
    "schedule.num_steps=4",
    "schedule.warmup_steps=1",
    "data.synthetic.num_documents=40",
    "data.sequence_length=64",
    "data.batch_sequences=4",
    "data.microbatch_sequences=2",
    "data.holdout_sequences=4",
    "observe.evaluate.every_steps=2",
    "parallel.dp_replicate=2",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SAMPLE_TOKENS", 8)
    return tmp_path


def test_the_full_demo(here: Path, capfd: Captured):
    assert run(["demo", *SMALL]) == 0
    printed = capfd.readouterr().out
    for part in (
        "ranks",
        "precision",
        "micro-batch",
        "The same command again:",
        "runs/demo/report.html",
    ):
        assert part in printed
    entropy = unigram_entropy(generated_tokens(SyntheticSpec(num_documents=40)).tokens)
    rows = read_metrics(here / "runs/demo")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert f"Held-out loss {rows[-1]['eval_loss']:.3f}" in printed and f"{entropy:.3f}" in printed
    events = [json.loads(line) for line in (here / "runs/demo/events-0.jsonl").read_text().splitlines()]
    assert not [event["text"] for event in events if event["kind"] == "restart"]
    assert [event["step"] for event in events if event["kind"] == "resume"] == [2]
    page = (here / "runs/demo/report.html").read_text()
    assert "unigram entropy" in page and demo.PROMPT in page


def test_an_earlier_demo_is_renamed(here: Path, capsys: Captured):
    for number in range(3):
        (here / "runs/demo").mkdir(parents=True)
        (here / "runs/demo/note").write_text(str(number))
        demo._move_aside(Path("runs/demo"))
    kept = {path.name: (path / "note").read_text() for path in (here / "runs").iterdir()}
    assert kept == {"demo-1": "0", "demo-2": "1", "demo-3": "2"}
    assert "runs/demo already existed; it is now runs/demo-3" in capsys.readouterr().out


def test_a_wrong_override_is_refused_before_anything_is_renamed(here: Path, capsys: Captured):
    (here / "runs/demo").mkdir(parents=True)
    assert run(["demo", "schedule.num_step=4"]) == 2
    assert "num_steps" in capsys.readouterr().err and (here / "runs/demo").exists()


def test_a_machine_without_memory_is_refused(here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    from meshwright.hardware import machine

    monkeypatch.setattr(machine, "_free_in_container", lambda: 2**27)
    assert run(["demo"]) == 3
    assert "parameters need" in capsys.readouterr().err and not (here / "runs").exists()


def test_an_error_that_the_ranks_have_printed_is_not_printed_again(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("meshwright.train.supervise.run_attempt", lambda *_, **__: AttemptEnd("refused", 2))
    assert run(["demo"]) == 2
    assert "exit code" not in capsys.readouterr().err
