"""A run ends when its evaluation loss no longer falls, on all ranks and over resumes alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.shrunk_families import shrunk_family

from meshwright.mesh import World
from meshwright.observe.events import events_path, read_events
from meshwright.observe.summary import read_summary
from meshwright.spec import RunSpec
from meshwright.spec.observe import EarlyStoppingSpec, EvaluateSpec, ObserveSpec
from meshwright.train.early_stopping import has_stopped_early
from meshwright.train.loop import train
from meshwright.train.state import TrainState


def stopping(patience: int) -> ObserveSpec:
    return ObserveSpec(
        evaluate=EvaluateSpec(every_steps=1, early_stopping=EarlyStoppingSpec(patience=patience))
    )


@pytest.mark.parametrize(
    ("losses", "min_delta", "expected"),
    [
        ([5.0, 4.0, 3.0], 0.0, 0),
        ([5.0, 4.0, 4.0, 4.5], 0.0, 2),
        ([5.0, 4.95, 4.91, 4.85], 0.1, 0),
        ([5.0, 4.95, 4.91, 4.9], 0.1, 3),
        ([5.0, 6.0, 4.0, 4.1], 0.0, 1),
    ],
)
def test_evaluations_without_a_lower_loss_are_counted(losses, min_delta: float, expected: int):
    state = TrainState()
    for loss in losses:
        state = state.after_evaluation(loss, min_delta=min_delta)
    assert state.evaluations_without_gain == expected and state.best_eval_loss == min(losses)
    assert has_stopped_early(stopping(expected + 1), state) is False
    assert expected == 0 or has_stopped_early(stopping(expected), state)
    assert not has_stopped_early(ObserveSpec(), state)


def run_of(patience: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "device": "cpu",
            "model": shrunk_family("llama-3.1-8b", vocab_size=257, num_layers=1).model_dump(),
            "schedule": {"num_steps": 20},
            "data": {
                "synthetic": {"num_documents": 8},
                "sequence_length": 16,
                "batch_sequences": 4,
                "holdout_sequences": 4,
            },
            "parallel": {"dp_replicate": 2},
            # No loss is lower by a hundred: the first evaluation stays the lowest one.
            "observe": {
                "evaluate": {"every_steps": 2, "early_stopping": {"patience": patience, "min_delta": 100}}
            },
        }
    )


def trained(run: RunSpec, run_dir: Path, stop_after: int | None = None) -> tuple[str, int]:
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    outcome = train(run, world, run_dir, stop_after=stop_after, quiet=True)
    return outcome.kind, outcome.state.step


def test_a_run_stops_once_and_goes_on_with_more_patience(ranks, tmp_path: Path):
    assert ranks.run(trained, 2, run_of(2), tmp_path, 4) == [("interrupted", 4)] * 2
    assert ranks.run(trained, 2, run_of(2), tmp_path) == [("finished", 6)] * 2
    assert events(tmp_path, "early_stop") == [{"step": 6, "evaluations": 2}]
    assert read_summary(tmp_path)["outcome"] == "finished"
    assert (tmp_path / "checkpoints" / "step-00000006" / "manifest.json").exists()
    # Its directory has no step left, unless the patience is larger.
    assert ranks.run(trained, 2, run_of(2), tmp_path) == [("finished", 6)] * 2
    assert len(events(tmp_path, "early_stop")) == 1
    assert ranks.run(trained, 2, run_of(3), tmp_path) == [("finished", 8)] * 2


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [event for event in read_events(events_path(run_dir, 0)) if event["kind"] == kind]
    return [{name: event[name] for name in ("step", "evaluations")} for event in found]
