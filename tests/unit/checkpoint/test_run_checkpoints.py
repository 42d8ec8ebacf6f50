"""Which settings a saved run may change."""

from pathlib import Path

import pytest
from tests.support.runs import tiny_run

from meshwright.checkpoint.run_checkpoints import allowed_changes
from meshwright.errors import CheckpointError
from meshwright.spec import ParallelSpec

HERE = Path("runs/here")


def test_another_mesh_is_a_change_that_is_allowed():
    saved = tiny_run("gqa", parallel=ParallelSpec(tp=2), microbatch_sequences=2).model_dump(mode="json")
    found = allowed_changes(tiny_run("gqa", name="renamed"), saved, HERE)
    assert [change.key for change in found] == ["data.microbatch_sequences", "parallel.tp"]


def test_a_field_that_was_added_since_is_no_difference():
    saved = tiny_run("gqa").model_dump(mode="json")
    del saved["optim"]["ema_decay"], saved["memory"]
    assert allowed_changes(tiny_run("gqa"), saved, HERE) == []


def test_what_is_refused_is_named_with_the_reason():
    saved = tiny_run("gqa", seed=4).model_dump(mode="json")
    expected = r"another run: seed was 4, is 3 \(the order of samples"
    with pytest.raises(CheckpointError, match=expected) as caught:
        allowed_changes(tiny_run("gqa"), saved, HERE)
    assert caught.value.where == str(HERE) and "--dir" in caught.value.hint


def test_a_spec_that_cannot_be_read_any_more_is_refused():
    saved = tiny_run("gqa").model_dump(mode="json")
    saved["optim"]["forgotten"] = 1
    expected = r"optim\.forgotten was 1, is null \(this version has no such setting\)"
    with pytest.raises(CheckpointError, match=expected):
        allowed_changes(tiny_run("gqa"), saved, HERE)
