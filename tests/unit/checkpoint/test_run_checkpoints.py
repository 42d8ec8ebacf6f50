"""Which saved runs may be resumed."""

from pathlib import Path

import pytest
from tests.support.runs import tiny_run

from meshwright.checkpoint.run_checkpoints import require_same_trajectory
from meshwright.errors import CheckpointError
from meshwright.spec import ParallelSpec

HERE = Path("runs/here")


def test_another_mesh_or_layout_is_the_same_trajectory():
    saved = tiny_run("gqa", parallel=ParallelSpec(tp=2), microbatch_sequences=2).model_dump(mode="json")
    require_same_trajectory(tiny_run("gqa", name="renamed"), saved, HERE)


def test_a_field_that_was_added_since_is_no_difference():
    saved = tiny_run("gqa").model_dump(mode="json")
    del saved["optim"]["ema_decay"], saved["memory"]
    require_same_trajectory(tiny_run("gqa"), saved, HERE)


def test_what_differs_is_named():
    saved = tiny_run("gqa", seed=4).model_dump(mode="json")
    with pytest.raises(CheckpointError, match=r"another run: seed was 4, is 3") as caught:
        require_same_trajectory(tiny_run("gqa"), saved, HERE)
    assert caught.value.where == str(HERE) and "--dir" in caught.value.hint


def test_a_spec_that_cannot_be_read_any_more_is_refused():
    saved = tiny_run("gqa").model_dump(mode="json")
    saved["optim"]["forgotten"] = 1
    with pytest.raises(CheckpointError, match=r"optim\.forgotten was 1, is None"):
        require_same_trajectory(tiny_run("gqa"), saved, HERE)
