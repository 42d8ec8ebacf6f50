"""Where the time of a run that was killed and restarted went: the parts add up to its wall time."""

import dataclasses
import json

import pytest
from tests.support.live_runs import LONGEST_SECONDS, SMALL, ranks_of, start, wait_for

from meshwright.observe.events import events_path, read_events
from meshwright.observe.goodput import read_goodput

RUN = (*SMALL, "schedule.num_steps=200", "checkpoint.every_steps=25", "observe.every_steps=50")
CAUSES = ("step", "start", "compile", "data", "checkpoint", "evaluate", "restart", "lost", "other")


def test_the_parts_of_an_interrupted_run_are_its_wall_time(tmp_path):
    with start(RUN, tmp_path) as launcher:
        wait_for(lambda: list(tmp_path.glob("checkpoints/step-*/manifest.json")), launcher)
        ranks_of(launcher)[1].kill()
        _, printed = launcher.communicate(timeout=LONGEST_SECONDS)
    assert launcher.returncode == 0, printed
    events = read_events(events_path(tmp_path, 0))
    (first,) = [one for one in events if one["kind"] == "start"]
    (last,) = [one for one in events if one["kind"] == "finish"]
    found = read_goodput(tmp_path)
    assert found is not None and found.num_restarts == 1
    parts = {name: getattr(found, name) for name in CAUSES}
    assert {one.name for one in dataclasses.fields(found)} == {*CAUSES, "num_restarts", "lost_steps"}
    assert sum(parts.values()) == pytest.approx(last["time"] - first["began_at"], abs=0.05)
    assert all(seconds >= 0 for seconds in parts.values()) and found.other < 0.25 * found.wall_seconds
    assert min(found.step, found.start, found.compile, found.restart, found.lost) > 0
    assert "goodput " in printed and ", 1 restart; " in printed and "restart " in printed
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["goodput_seconds"].keys() >= set(CAUSES) - {"step"}
