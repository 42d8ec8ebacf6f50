"""The report: the run's numbers on one page that loads nothing, whatever state the directory is in."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.cli.main import run as run_cli
from meshwright.observe.events import EventWriter
from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate
from meshwright.observe.run_report import event_line, write_report
from meshwright.observe.summary import RunSummary, write_summary

RUN_YAML = """\
version: 2
name: tiny
model:
  family: llama-like <script>alert(1)</script>
precision:
  compute: bf16
schedule:
  num_steps: 12
"""


def write_metrics(run_dir: Path, num_steps: int, **by_step: dict[int, float]) -> None:
    """Losses 5/step; `loss={3: nan}` replaces values of single steps."""
    with MetricsWriter(run_dir, WorkRate(6e9, 2, 1e12)) as writer:
        for step in range(1, num_steps + 1):
            values = {"loss": 5.0 / step, "grad_norm": 1.0 + 1.0 / step, "eval_loss": None}
            values |= {name: changes[step] for name, changes in by_step.items() if step in changes}
            metrics = StepMetrics(
                step=step,
                lr=1e-3,
                tokens=2000 * step,
                step_tokens=2000,
                step_seconds=0.25,
                peak_bytes=3 * 2**30,
                **values,  # pyright: ignore[reportArgumentType]
            )
            writer.write(metrics)


def write_run(run_dir: Path) -> None:
    write_metrics(run_dir, 12, eval_loss={6: 0.987, 12: 0.4321})
    with EventWriter(run_dir, 0) as events:
        events.write("start", step=0)
        events.write("checkpoint", step=6, seconds=0.5)
        events.write("resume", step=6)
        events.write("finish", step=12)
    (run_dir / "run.yaml").write_text(RUN_YAML)
    (run_dir / "sample.txt").write_text("once upon a <b>time</b>")
    summary = RunSummary(
        outcome="finished",
        final_step=12,
        wall_seconds=5400.0,
        num_ranks=2,
        device="cpu",
        num_parameters=1_230_000,
        flops_per_token=6e9,
        fingerprint="feedbeef00000000",
        unigram_entropy=2.7183,
        versions={"torch": "2.13.0"},
    )
    write_summary(run_dir, summary)


class Tags(HTMLParser):
    """Collects tags and attributes, and refuses tags that do not nest."""

    void = frozenset({"meta", "path", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def report(run_dir: Path) -> str:
    return write_report(run_dir).path.read_text()


def chart_titles(page: str) -> list[str]:
    return re.findall(r"<figcaption><h2>([^<]+)</h2>", page)


def test_page_shows_the_figures(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = report(tmp_path)
    for shown in ("0.4167", "0.4321", "24K", "1.5 h", "8K", "3.0 GiB", "2.7183", "12 of 12 steps"):
        assert shown in page
    assert "2400.0%" in page  # 8000 tokens/s x 6e9 / 2 ranks over a peak of 1e12
    assert "1.23M parameters · 2 ranks · cpu · bf16" in page
    assert "unigram entropy 2.718" in page
    assert chart_titles(page) == [
        *("Loss", "Gradient norm", "Learning rate", "Throughput", "Step time", "Peak memory")
    ]
    assert page.count('<path class="mark"') == 6  # the resume, once in every chart
    assert "feedbeef00000000" in page
    assert "2.13.0" in page


def test_page_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = report(tmp_path)
    tags = parse(page)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.replace("// Reads values", ""))
    assert not [tag for tag, attrs in tags.seen if "src" in attrs or "href" in attrs]
    assert "<script>alert" not in page
    assert "once upon a &lt;b&gt;time" in page
    assert len(page) < 300_000


def test_twenty_thousand_steps_stay_small_and_keep_the_spike(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20_000, loss={12_345: 4.75})
    page = report(tmp_path)
    assert len(page) < 300_000
    assert "4.75" in page


def test_a_single_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    page = report(tmp_path)
    parse(page)
    assert "5.0000" in page
    assert 'class="dots' in page


def test_non_finite_losses_are_shown(tmp_path: Path) -> None:
    write_metrics(tmp_path, 9, loss={4: math.nan, 9: math.inf}, grad_norm={4: math.nan})
    page = report(tmp_path)
    assert "not finite at 2 step(s): 4, 9." in page
    assert "not finite at step 4" in page
    assert ">inf<" in page
    hover = re.search(r'id="hover">(.*?)</script>', page)
    assert hover is not None
    json.loads(hover.group(1), parse_constant=pytest.fail)


def test_all_losses_non_finite(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3, loss=dict.fromkeys((1, 2, 3), math.nan))
    assert "not finite at 3 step(s)" in report(tmp_path)


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    page = report(tmp_path)
    assert "Not in this run directory: run.yaml, events-0.jsonl, summary.json, sample.txt." in page
    assert ">incomplete<" in page


@pytest.mark.parametrize(
    "name", ["run.yaml", "metrics.jsonl", "events-0.jsonl", "summary.json", "sample.txt"]
)
@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe\x00" * 50, b"{{{{ : [", b'[1, "a"]', b"null", b"x: " + b"[" * 3000, b""],
    ids=["bytes", "broken", "list", "null", "deep", "empty"],
)
def test_damaged_pieces_do_not_stop_it(tmp_path: Path, name: str, damage: bytes) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_bytes(damage)
    parse(report(tmp_path))


def test_summary_and_run_of_unexpected_shape(tmp_path: Path) -> None:
    write_run(tmp_path)
    odd = {
        "outcome": [1],
        "versions": "x",
        "wall_seconds": "long",
        "num_parameters": {},
        "unigram_entropy": True,
    }
    (tmp_path / "summary.json").write_text(json.dumps(odd))
    (tmp_path / "run.yaml").write_text("name: [1, 2]\nmodel: llama\nprecision: bf16\nschedule: none\n")
    (tmp_path / "events-0.jsonl").write_text('{"kind": "resume", "time": 1e300, "step": "six"}\n')
    parse(report(tmp_path))


def test_verb_prints_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    output = tmp_path / "elsewhere.html"
    assert run_cli(["report", str(tmp_path), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.exists()
    assert not list(tmp_path.glob("*.draft"))


def test_verb_prints_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert run_cli(["report", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert figures["report"] == str(tmp_path / "report.html")
    assert (figures["final_step"], figures["eval_loss"], figures["resumed_at"]) == (12, 0.4321, [6])


@pytest.mark.parametrize("what", ["missing", "not a run", "a file", "unwritable"])
def test_bad_input_exits_2(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    write_run(tmp_path)
    arguments = {
        "missing": [str(tmp_path / "nowhere")],
        "not a run": [str(tmp_path / "empty")],
        "a file": [str(tmp_path / "file")],
        "unwritable": [str(tmp_path), "-o", str(tmp_path / "nowhere" / "report.html")],
    }[what]
    assert run_cli(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    ("verb", "stderr"),
    [
        (["report", "RUN"], ""),
        (
            ["compare", "RUN", "RUN"],
            "weights are not compared: the runs have no checkpoint of the same step\n",
        ),
    ],
    ids=["report", "compare"],
)
def test_verbs_work_without_torch(tmp_path: Path, verb: list[str], stderr: str) -> None:
    write_run(tmp_path)
    arguments = [str(tmp_path) if word == "RUN" else word for word in verb]
    program = f"""
import sys
sys.modules["torch"] = None
from meshwright.cli.main import run
sys.exit(run({arguments!r}))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, stderr)


def test_events_are_sentences_without_the_words_of_the_file():
    saved = {"time": 0.0, "kind": "checkpoint", "rank": 0, "host": "n1", "step": 3, "stall_seconds": 0.0173}
    assert event_line(saved) == (
        "1970-01-01 00:00:00",
        "checkpoint",
        "saved a checkpoint (step 3, stall 17.3 ms)",
    )
    warned = {"time": 0.0, "kind": "warning", "step": 4, "text": "the disk is full"}
    assert event_line(warned)[2] == "warning: the disk is full (step 4)"
    assert event_line({"time": 0.0, "kind": "resume", "step": 5, "began_at": 1.8e9})[2] == "resumed (step 5)"


def test_preference_runs_show_rewards(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    rewards = {step: step / 4 for step in range(1, 5)}
    write_metrics(tmp_path, 4, reward_margin=rewards, reward_accuracy=rewards)
    page = report(tmp_path)
    assert {"Reward margin", "Reward accuracy"} <= set(chart_titles(page))
    assert "Mean over pairs." in page and "Nats per token." not in page
