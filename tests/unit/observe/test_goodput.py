"""Goodput from the events of a run: over restarts, lost steps and pauses."""

import json
import os
from pathlib import Path

import pytest

from meshwright.observe.goodput import goodput_of, read_goodput
from meshwright.observe.watch.watched_run import WatchedRun
from meshwright.resilience.phase_clock import PhaseClock


def _write(run_dir: Path, *events: dict) -> None:
    lines = [json.dumps({"rank": 0, "host": "h", **event}) for event in events]
    (run_dir / "events-0.jsonl").write_text("\n".join(lines) + "\n")


def _time(at: float, after_step: int, **seconds: float) -> dict:
    return {"time": at, "kind": "time", "step": after_step, **{f"{k}_seconds": s for k, s in seconds.items()}}


FIRST = (
    {"time": 10.0, "kind": "start", "began_at": 0.0},
    _time(25.0, 10, build=10.0, first_step=4.0, step=10.0, data=2.0, save=1.0),
    _time(36.0, 20, build=10.0, first_step=4.0, step=20.0, data=4.0, save=2.0),
)


def test_a_run_without_failures(tmp_path):
    _write(tmp_path, *FIRST, {"time": 36.0, "kind": "finish", "step": 20})
    found = read_goodput(tmp_path)
    assert found is not None and found.wall_seconds == 36.0
    assert (found.step, found.start, found.compile, found.data, found.checkpoint) == (
        16.0,
        10.0,
        4.0,
        4.0,
        2.0,
    )
    assert found.share == pytest.approx(16 / 36) and found.lost == found.restart == 0.0
    assert found.line().startswith("goodput 44.4% of 36.0") and "checkpoint 5.6%" in found.line()


def test_lost_steps_and_the_restart_are_counted(tmp_path):
    """Killed after the second checkpoint, which was not complete: the next start resumes from the first."""
    restart = {"time": 42.0, "kind": "restart", "failed_at": 41.0, "lost_steps": 14}
    resumed = (
        {"time": 46.0, "kind": "resume", "step": 10, "began_at": 43.0},
        _time(60.0, 20, build=3.0, first_step=1.0, step=10.0),
        {"time": 60.0, "kind": "finish", "step": 20},
    )
    _write(tmp_path, *FIRST, restart, *resumed)
    found = read_goodput(tmp_path)
    assert found is not None and found.wall_seconds == pytest.approx(60.0)
    assert found.step == 8.0 + 10.0
    assert found.lost == 41.0 - 25.0, "everything after the checkpoint that the next start resumed from"
    assert found.restart == 2.0 + 3.0, "the time between the two, and the build of the second"
    assert (found.num_restarts, found.lost_steps) == (1, 14)


def test_a_pause_on_purpose_is_no_loss(tmp_path):
    stopped = {"time": 36.0, "kind": "interrupt", "step": 20}
    resumed = (
        {"time": 10_003.0, "kind": "resume", "step": 20, "began_at": 10_000.0},
        _time(10_010.0, 30, build=3.0, first_step=1.0, step=6.0),
        {"time": 10_010.0, "kind": "finish", "step": 30},
    )
    _write(tmp_path, *FIRST, stopped, *resumed)
    found = read_goodput(tmp_path)
    assert found is not None and found.wall_seconds == pytest.approx(46.0)
    assert found.start == 13.0 and found.restart == found.lost == 0.0


def test_events_without_times_say_nothing(tmp_path):
    assert read_goodput(tmp_path) is None
    _write(tmp_path, {"time": 1.0, "kind": "start"}, {"time": 2.0, "kind": "finish", "step": 1})
    assert read_goodput(tmp_path) is None


def test_steps_since_the_last_save_of_a_run_that_goes_on_count():
    found = goodput_of(FIRST, until=46.0)
    assert found is not None and (found.step, found.wall_seconds) == (16.0 + 10.0, 46.0)
    new = goodput_of(FIRST[:1], until=30.0)
    assert new is not None and (new.start, new.step) == (10.0, 20.0), "no checkpoint yet"
    failed = (*FIRST, {"time": 41.0, "kind": "restart", "failed_at": 41.0, "lost_steps": 14})
    assert goodput_of(failed, until=40.0) == goodput_of(failed), "steps before a failure may be lost"


def test_clocks_that_overlap_and_a_long_wait_for_the_first_batch_add_up(tmp_path):
    """The second start began 1 s before the end of the first by its clock, and waited for its first batch."""
    events = (
        {"time": 10.0, "kind": "start", "began_at": 0.0},
        _time(25.0, 10, build=10.0, first_step=4.0, step=10.0, save=1.0),
        {"time": 31.0, "kind": "restart", "failed_at": 30.0, "lost_steps": 3},
        {"time": 33.0, "kind": "resume", "step": 10, "began_at": 29.0},
        _time(40.0, 20, build=4.0, first_step=5.0, step=2.0, data=4.5),
        {"time": 40.0, "kind": "finish", "step": 20},
    )
    _write(tmp_path, *events)
    found = read_goodput(tmp_path)
    assert found is not None and found.wall_seconds == pytest.approx(40.0)
    assert (found.restart, found.compile, found.lost, found.other) == (3.0, 4.0 + 2.5, 5.0, 0.0)


def test_the_live_page_shows_the_same_goodput(tmp_path):
    _write(tmp_path, *FIRST)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    os.utime(tmp_path / "metrics.jsonl", (46.0, 46.0))
    watched = WatchedRun(tmp_path, "run")
    watched.poll()
    snapshot = watched.snapshot()
    assert snapshot["goodput"] == pytest.approx(26.0 / 46.0)
    assert snapshot["goodput_causes"].startswith("start 21.7%, compile 8.7%")


def test_the_clock_of_phases():
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    for phase, seconds in (("start", 3.0), ("step", 5.0), ("save", 1.0), ("step", 2.0)):
        clock.enter(phase)
        now[0] += seconds
    assert (clock.seconds("start"), clock.seconds("step"), clock.seconds("save")) == (3.0, 7.0, 1.0)
    assert clock.build_seconds > 0.0
