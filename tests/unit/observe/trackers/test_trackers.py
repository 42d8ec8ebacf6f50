"""Weights & Biases and MLflow, as the real packages without a network."""

import json
import math
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.shrunk_families import shrunk_family

from meshwright.errors import RunError, SpecError
from meshwright.mesh import World
from meshwright.observe.events import events_path, read_events
from meshwright.observe.metrics import StepMetrics, read_metrics
from meshwright.observe.trackers import tracker_thread
from meshwright.observe.trackers.mlflow_run import MlflowRun
from meshwright.observe.trackers.tracker import Ending, Row, TrackedRun
from meshwright.observe.trackers.tracker_process import TrackerProcess
from meshwright.observe.trackers.tracker_thread import TrackerThread
from meshwright.observe.trackers.trackers import Trackers, require_trackers
from meshwright.spec import RunSpec
from meshwright.spec.observe import MlflowSpec, ObserveSpec, WandbSpec
from meshwright.train.loop import train

# SQLAlchemy 2.1 warns about what MLflow still uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def a_step(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=1.0 / step,
        grad_norm=1.0,
        lr=1e-3,
        tokens=step * 10,
        step_tokens=10,
        step_seconds=1.0,
        peak_bytes=None,
    )


def a_run(run_dir: Path, **settings: Any) -> TrackedRun:
    return TrackedRun(name="a", run_dir=run_dir, settings=settings, facts={"device": "CPU"})


class Recording:
    """A tracker that keeps what it is given; waits for `gate` before it takes anything."""

    def __init__(self, gate: threading.Event | None = None, fails_at: int | None = None) -> None:
        self.run_id, self.rows, self.ending = "id-1", list[Row](), None
        self.is_killed = False
        self._gate, self._fails_at = gate, fails_at

    def open(self) -> None: ...

    def kill(self) -> None:
        self.is_killed = True
        if self._gate is not None:
            self._gate.set()

    def log(self, rows: Sequence[Row]) -> None:
        if self._gate is not None:
            self._gate.wait(60)
        self.rows.extend(rows)
        if self._fails_at is not None and rows[-1].step >= self._fails_at:
            raise RuntimeError("the server\nsaid no")

    def close(self, ending: Ending) -> None:
        self.ending = ending


def rows_of(*steps: int) -> list[Row]:
    return [Row(step, 0.0, {"loss/train": 1.0}) for step in steps]


def test_a_resume_continues_the_run_and_sends_no_step_twice(tmp_path: Path):
    first, second, opened_with = Recording(), Recording(), list[str | None]()

    def opener(tracker: Recording):
        return lambda run_id: opened_with.append(run_id) or tracker

    thread = TrackerThread("wandb", tmp_path, opener(first))
    for row in rows_of(1, 2, 3):
        thread.write(row)
    thread.close("failed")
    thread = TrackerThread("wandb", tmp_path, opener(second))
    for row in rows_of(2, 3, 4):
        thread.write(row)
    thread.close("finished")
    assert opened_with == [None, "id-1"]
    assert [row.step for row in first.rows] == [1, 2, 3] and [row.step for row in second.rows] == [4]
    assert (first.ending, second.ending) == ("failed", "finished") and thread.pop_warnings() == []


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path: Path):
    thread = TrackerThread("wandb", tmp_path, lambda _: Recording(fails_at=1))
    for row in rows_of(1, 2, 3):
        thread.write(row)
    thread.close("finished")
    expected = "wandb failed, and the run goes on without it: the server said no"
    assert thread.pop_warnings() == [expected]


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tracker_thread, "CLOSE_SECONDS", {"finished": 0.05})
    monkeypatch.setattr(tracker_thread, "_MAX_WAITING_ROWS", 4)
    gate = threading.Event()
    tracker = Recording(gate)
    thread = TrackerThread("mlflow", tmp_path, lambda _: tracker)
    for row in rows_of(*range(1, 101)):
        thread.write(row)
    thread.close("finished")
    slow, late = thread.pop_warnings()
    assert "steps were not sent" in slow and tracker.is_killed
    assert late == "mlflow did not end within 0.05 s; the run ends without it"


def test_a_package_that_is_missing_is_refused_before_the_run_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    require_trackers(ObserveSpec(wandb=WandbSpec()))
    with pytest.raises(SpecError, match=r"observe.mlflow needs sqlalchemy, not installed") as raised:
        require_trackers(ObserveSpec(mlflow=MlflowSpec()))
    assert raised.value.hint == 'pip install "meshwright[mlflow]", or set observe.mlflow=null'


def test_without_a_key_wandb_asks_nobody_and_names_the_remedy(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    found = list[str]()
    with Trackers(ObserveSpec(wandb=WandbSpec()), a_run(tmp_path), warn=found.append) as trackers:
        trackers.write(a_step(1))
        trackers.end("finished")
    (text,) = found
    assert text.startswith("wandb failed, and the run goes on without it: No API key configured.")


def test_a_process_that_is_killed_ends_no_run(tmp_path: Path, monkeypatch):
    process = TrackerProcess("mlflow", MlflowSpec(), a_run(tmp_path), None)
    process.kill()
    with pytest.raises(RunError, match="its process ended with exit code -9"):
        process.open()


def run_of(num_steps: int, **observe: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "tracked",
            "device": "cpu",
            "model": shrunk_family("llama-3.1-8b", vocab_size=257, num_layers=1).model_dump(),
            "schedule": {"num_steps": num_steps, "kind": "constant"},
            "data": {"synthetic": {"num_documents": 4}, "sequence_length": 16, "batch_sequences": 4},
            "parallel": {"dp_replicate": 2},
            "observe": observe,
        }
    )


def trained(run: RunSpec, run_dir: Path, stop_after: int | None) -> int:
    os.environ["WANDB_MODE"] = "offline"
    tracker_thread.CLOSE_SECONDS.update(finished=300.0, interrupted=300.0)  # a loaded machine
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    return train(run, world, run_dir, stop_after=stop_after, quiet=True).state.step


def test_a_run_of_two_ranks_is_tracked_once_and_continued(ranks, tmp_path: Path):
    pytest.importorskip("wandb")
    run = run_of(5, wandb={"project": "p"})
    ranks.run(trained, 2, run, tmp_path, 3)
    ranks.run(trained, 2, run, tmp_path, None)
    events = read_events(events_path(tmp_path, 0))
    assert [event["text"] for event in events if event["kind"] == "warning"] == []
    losses = {row["step"]: row["loss"] for row in read_metrics(tmp_path)}
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    identity = json.loads((tmp_path / "trackers" / "wandb.json").read_text())["run_id"]
    assert len(folders) == 2 and all(folder.name.endswith(identity) for folder in folders)
    rows, config = list[dict[str, Any]](), dict[str, Any]()
    for record in (record for folder in folders for record in wandb_records(next(folder.glob("*.wandb")))):
        if record.WhichOneof("record_type") == "history":
            rows.append(values_of(record.history.item))
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.display_name) == ("p", "tracked")
            config |= values_of(record.run.config.update)
    assert {row["_step"]: row["loss/train"] for row in rows} == losses and len(rows) == 5
    assert config["model.width"] == run.model.width and config["system.num_ranks"] == 2


def test_mlflow_has_one_run_with_settings_facts_and_every_step_once(tmp_path: Path, monkeypatch):
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = a_run(tmp_path / "a", **{"model.width": 64, "data.path": "x" * 900, "parallel.tp": 1})
    first = MlflowRun(MlflowSpec(experiment="e"), run, None)
    first.log([Row(step, 1.5, {"loss/train": 1.0 / step}) for step in (1, 2)])
    first.close("interrupted")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert client.get_run(first.run_id).info.status == "KILLED"
    second = MlflowRun(MlflowSpec(experiment="e"), run, first.run_id)
    assert client.get_run(first.run_id).info.status == "RUNNING"
    second.log([Row(3, 2.5, {"loss/train": math.inf, "lr": 1.0})])
    second.close("finished")

    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "a")
    assert found.data.params == {"model.width": "64", "data.path": "x" * 500, "parallel.tp": "1"}
    assert found.data.tags["system.device"] == "CPU"
    history = client.get_metric_history(found.info.run_id, "loss/train")
    assert [(point.step, point.timestamp) for point in history] == [(1, 1500), (2, 1500), (3, 2500)]


def values_of(items: Any) -> dict[str, Any]:
    """The values of items of W&B, whose keys are texts or lists of one text."""
    return {(list(item.nested_key) or [item.key])[0]: json.loads(item.value_json) for item in items}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: protobuf messages in a LevelDB log, whose blocks are of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""
