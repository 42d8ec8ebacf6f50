"""Events: complete lines with rank and time, and no secrets."""

import json
import math
from pathlib import Path

import pytest

from meshwright.observe.events import EventWriter, events_path, read_events


def test_an_event_has_rank_host_and_time(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=3) as events:
        events.write("checkpoint", step=5, seconds=0.25)
    (event,) = read_events(tmp_path / "events-3.jsonl")
    assert (event["kind"], event["rank"], event["step"], event["seconds"]) == ("checkpoint", 3, 5, 0.25)
    assert event["host"]
    assert event["time"] > 1.6e9


def test_numbers_that_json_has_no_notation_for(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=0) as events:
        events.write("overflow", step=1, norm=math.inf)
    line = events_path(tmp_path, 0).read_text()
    assert json.loads(line, parse_constant=pytest.fail)["norm"] == "Infinity"


def test_an_incomplete_line_does_not_damage_the_next(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=0) as events:
        events.write("start", step=0)
    path = events_path(tmp_path, 0)
    path.write_bytes(path.read_bytes() + b'{"time": 1, "ki')
    with EventWriter(tmp_path, rank=0) as events:
        events.write("resume", step=0)
    assert [event["kind"] for event in read_events(path)] == ["start", "resume"]


def test_no_environment_and_no_credentials(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=0) as events:
        with pytest.raises(AssertionError, match="mapping"):
            events.write("start", environment={"HOME": "/root"})
        events.write("start", path="s3://user:pass@store/bucket", others=["tcp://me:pw@host:1"])
    (event,) = read_events(events_path(tmp_path, 0))
    assert event["path"] == "s3://***@store/bucket"
    assert event["others"] == ["tcp://***@host:1"]


def test_reader_skips_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    path.write_bytes(b'\xff\n{"kind": 1}\n[]\n{"kind": "start", "time": "now"}\n{"kind":"finish","time":1}')
    assert [event["kind"] for event in read_events(path)] == ["finish"]
    assert read_events(tmp_path / "nowhere") == []
