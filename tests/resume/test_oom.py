"""A rank runs out of memory: the run ends with what to change, or is restarted with smaller micro-batches."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.equivalence import RTOL, worst_errors
from tests.support.oom_rank import TEXT
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import tiny_run

from meshwright.cli.main import run as run_command
from meshwright.errors import EXIT_INPUT, EXIT_RUN_FAILED
from meshwright.launch import rank_process
from meshwright.observe.events import events_path, read_events
from meshwright.observe.metrics import read_metrics
from meshwright.observe.summary import read_summary
from meshwright.spec import CheckpointSpec, MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.text import dump_run, load_run
from meshwright.train.oom_restart import smaller_microbatch

HALVE = MemorySpec(on_oom="halve_microbatch")
EVERY_2 = CheckpointSpec(every_steps=2)
LAYOUTS = {
    "one": ParallelSpec(),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
    "pp": ParallelSpec(pp=2),
}
GENUINE = subprocess.Popen
ROOT = Path(__file__).parents[2]


def run_of(layout: str = "one", **changes: Any) -> RunSpec:
    return tiny_run(
        "tied", parallel=LAYOUTS[layout], microbatch_sequences=2, batch_sequences=8, device="cpu", **changes
    )


@pytest.fixture
def oom(monkeypatch: pytest.MonkeyPatch):
    """Call with place, rank and step: the ranks that are started from then on run out of memory there."""

    def plant(place: str, rank: int, step: int) -> None:
        def start(command: list[str], **options: Any) -> Any:
            assert command[1:3] == ["-m", "meshwright"]
            program = [sys.executable, "-m", "tests.support.oom_rank", place, str(rank), str(step)]
            return GENUINE([*program, *command[3:]], cwd=ROOT, **options)

        monkeypatch.setattr(rank_process.subprocess, "Popen", start)

    return plant


def train(run: RunSpec, folder: Path, name: str = "run") -> tuple[int, Path]:
    """Exit code and directory of `meshwright train`, whose ranks are processes of their own."""
    file = folder / f"{name}.yaml"
    file.write_text(dump_run(run))
    return run_command(["train", str(file), "--dir", str(folder / name)]), folder / name


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_tensors(last_checkpoint(run_dir))


def test_restarted_with_smaller_microbatches_from_the_start(ranks, oom, tmp_path, capfd):
    """Without a checkpoint: bitwise the run that had them from the start."""
    run = run_of(memory=HALVE)
    oom("forward", 0, 1)
    code, run_dir = train(run, tmp_path)
    assert code == 0
    small = smaller_microbatch(run)
    assert small is not None
    attempt(ranks, small, tmp_path / "small")
    found, expected = final_tensors(run_dir), final_tensors(tmp_path / "small")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_run(run_dir / "run.yaml").data.microbatch_sequences == 1
    line = "out of memory: restarting with data.microbatch_sequences=1 from the newest checkpoint"
    assert line in capfd.readouterr().err.splitlines()
    events = read_events(events_path(run_dir, 0))
    assert [event["kind"] for event in events][:4] == ["start", "failure", "restart", "start"]
    assert (events[2]["text"], events[2]["microbatch_sequences"]) == (line, 1)


@pytest.mark.parametrize(
    ("layout", "place", "rank"),
    [
        ("zero_3", "backward", 1),
        pytest.param("pp", "forward", 0, marks=pytest.mark.soak),
        pytest.param("zero_3", "update", 0, marks=pytest.mark.soak),
    ],
)
def test_a_restart_resumes_from_the_newest_checkpoint(ranks, oom, tmp_path, capfd, layout, place, rank):
    """Momentum, averages, position of the data and number of updates are those of step 2."""
    run = run_of(layout, memory=HALVE, checkpoint=EVERY_2)
    run = run.with_(optim=run.optim.with_(ema_decay=0.5))
    oom(place, rank, 4)
    code, run_dir = train(run, tmp_path)
    assert code == 0
    printed = capfd.readouterr().err
    assert f"rank {rank} ran out of memory in step 4: {TEXT}" in printed and "resumed at step 2" in printed
    plain_dir = tmp_path / "plain"
    attempt(ranks, run.with_(memory=MemorySpec()), plain_dir)
    assert max(worst_errors(final_tensors(run_dir), final_tensors(plain_dir)).values()) < RTOL
    steps = [row["step"] for row in read_metrics(run_dir)]
    assert steps == list(range(1, run.schedule.num_steps + 1))
    losses = [[row["loss"] for row in read_metrics(each)] for each in (run_dir, plain_dir)]
    assert losses[0] == pytest.approx(losses[1], rel=RTOL)


def test_by_default_the_run_ends_with_what_to_do(oom, tmp_path, capfd):
    oom("forward", 1, 2)
    code, run_dir = train(run_of("zero_3"), tmp_path)
    assert code == EXIT_RUN_FAILED
    printed = capfd.readouterr().err
    lines = printed[printed.index("rank 1 failed first:") :].splitlines()
    assert lines[1] == f"error: rank 1 ran out of memory in step 2: {TEXT}"
    assert lines[2].split() == ["predicted", "measured"]
    assert [line.split()[0] for line in lines[3:7]] == ["weights", "gradients", "optimizer", "activations"]
    assert lines[3].split()[1] == "unknown"
    assert lines[7] == f"  where: {run_dir}"
    assert lines[8].endswith("memory.on_oom=halve_microbatch does that by itself, with smaller micro-batches")
    assert "lost the connection to another rank" in printed, "rank 0 has no part in it"
    assert [row["step"] for row in read_metrics(run_dir)] == [1]
    summary = read_summary(run_dir)
    assert (summary["outcome"], summary["final_step"]) == ("failed", 1)
    failures = [event for event in read_events(events_path(run_dir, 1)) if event["kind"] == "failure"]
    assert failures[0]["text"].startswith("rank 1 ran out of memory in step 2")


def test_one_process_ends_with_the_same_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.train.loop.train_step", _out_of_memory)
    code, run_dir = train(run_of(), tmp_path)
    assert code == EXIT_RUN_FAILED
    opening, error, *_ = capsys.readouterr().err.splitlines()
    assert opening.startswith(f"{run_dir}: ") and "parameters" in opening
    assert error.startswith(f"error: rank 0 ran out of memory in step 1: {TEXT}")
    assert read_events(events_path(run_dir, 0))[-1]["text"].startswith("rank 0 ran out of memory in step 1")


def _out_of_memory(*_: Any, **__: Any) -> None:
    """As torch's pipeline raises it: wrapped."""
    raise RuntimeError("stage 0 failed") from torch.OutOfMemoryError(TEXT)


def test_when_nothing_is_left_to_halve_the_run_ends(oom, tmp_path, capfd):
    oom("forward", -1, 0)
    code, run_dir = train(run_of(memory=HALVE), tmp_path)
    assert code == EXIT_RUN_FAILED
    printed = capfd.readouterr().err
    assert printed.count("rank 0 ran out of memory in step 1") == 2 and printed.count("restarting") == 1
    assert yaml.safe_load((run_dir / "run.yaml").read_text())["memory"]["on_oom"] == "stop"


def test_another_launcher_is_refused_with_what_to_set_instead(tmp_path, monkeypatch):
    """torchrun starts the ranks, so nothing here can restart them."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run_of(memory=HALVE)))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_INPUT
    assert "another launcher has started these\n  where: memory.on_oom\n" in ended.stderr
    assert "set memory.on_oom=stop" in ended.stderr and "data.microbatch_sequences" in ended.stderr


@pytest.mark.parametrize(("size", "smaller"), [(8, 4), (6, 3), (3, 1), (5, 1)])
def test_halves_or_the_next_smaller_divisor(size, smaller):
    run = tiny_run("gqa", microbatch_sequences=size, batch_sequences=2 * size, memory=HALVE)
    changed = smaller_microbatch(run)
    assert changed is not None
    assert changed.data.microbatch_sequences == smaller
    assert changed.data.batch_sequences == run.data.batch_sequences
    assert changed.memory.on_oom == ("halve_microbatch" if smaller > 1 else "stop")


def test_one_sequence_cannot_be_halved():
    assert smaller_microbatch(tiny_run("gqa")) is None
