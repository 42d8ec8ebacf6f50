"""The pipeline timeline of a profile, as the live page gets it."""

import json
from pathlib import Path

import pytest
from tests.support.watched_runs import write_timeline

from meshwright.observe.watch import pipeline
from meshwright.observe.watch.pipeline import read_timeline, timeline_path
from meshwright.observe.watch.watched_run import WatchedRun


def test_measured_and_predicted_actions_of_every_rank(tmp_path: Path):
    document = write_timeline(tmp_path, pp=4)
    found = read_timeline(tmp_path)
    assert found is not None
    assert found["schedule"] == "1f1b" and found["num_ranks"] == 4
    assert found["ranks"][3]["measured"] == document["ranks"][3]["measured"]
    assert found["ranks"][0]["predicted"][0] == ["F", 0, 0, 0.0, 1.0]


def test_many_ranks_are_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_timeline(tmp_path, pp=4)
    monkeypatch.setattr(pipeline, "MAX_RANKS", 2)
    monkeypatch.setattr(pipeline, "MAX_ACTIONS", 3)
    found = read_timeline(tmp_path)
    assert found is not None and found["num_ranks"] == 4
    assert [len(rank["measured"]) for rank in found["ranks"]] == [3, 3]


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"ranks": [{"rank": 0}]}', '{"ranks": 7}'))
def test_a_damaged_file_is_left_out(tmp_path: Path, text: str):
    timeline_path(tmp_path).parent.mkdir()
    timeline_path(tmp_path).write_text(text)
    assert read_timeline(tmp_path) is None


def test_a_profile_made_later_is_noticed(tmp_path: Path):
    run = WatchedRun(tmp_path, "run")
    run.poll()
    assert run.timeline() is None
    document = write_timeline(tmp_path, pp=2)
    run.poll()
    assert run.timeline() is not None
    assert json.dumps(run.timeline(), allow_nan=False)
    assert run.timeline()["measured_seconds"] == document["measured_seconds"]  # pyright: ignore[reportOptionalSubscript]
