"""Which checkpoints are kept: the last ones, every n-th step, every n-th epoch, the best ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.retain import delete_old
from meshwright.checkpoint.save import FORMAT_VERSION, MANIFEST, step_folder
from meshwright.spec import CheckpointSpec

LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 1.0, 60: 4.0}


def publish(root: Path, step: int, *, loss: float | None, measured_at: int | None = None) -> None:
    """A checkpoint with an evaluation loss; an epoch has 25 steps."""
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    state = {"last_eval_loss": loss, "last_eval_step": measured_at or step}
    files = {INDEX: {"bytes": 0, "sha256": ""}}
    manifest = {"version": FORMAT_VERSION, "step": step, "files": files, "state": state}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "num_epochs": step // 25}))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [50, 60]),
        ({"keep_last": 1, "keep_every_steps": 20}, [20, 40, 60]),
        ({"keep_last": 1, "keep_every_epochs": 1}, [30, 50, 60]),
        ({"keep_last": 1, "keep_every_epochs": 2}, [50, 60]),
        ({"keep_last": 1, "keep_best": 1}, [50, 60]),
        ({"keep_last": 1, "keep_best": 3}, [20, 40, 50, 60]),
        ({"keep_last": 1, "keep_best": 1, "keep_every_steps": 30}, [30, 50, 60]),
    ],
)
def test_what_is_kept(tmp_path: Path, settings: dict[str, Any], kept: list[int]) -> None:
    for step, loss in LOSSES.items():
        publish(tmp_path, step, loss=loss)
    delete_old(tmp_path, CheckpointSpec(every_steps=10, **settings))
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == kept


def test_a_loss_of_another_step_does_not_count(tmp_path: Path) -> None:
    publish(tmp_path, 10, loss=2.0)
    publish(tmp_path, 15, loss=1.0, measured_at=14)
    publish(tmp_path, 20, loss=3.0)
    delete_old(tmp_path, CheckpointSpec(every_steps=5, keep_last=1, keep_best=1))
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == [10, 20]


def test_a_damaged_one_does_not_push_an_intact_one_out(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        publish(tmp_path, step, loss=1.0)
    delete_old(tmp_path, CheckpointSpec(keep_last=2), damaged=[step_folder(tmp_path, 30)])
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == [10, 20]
