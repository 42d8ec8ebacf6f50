"""Heartbeat files: written in place, read by others, never trusted."""

import os

import pytest

from meshwright.launch.heartbeat import (
    Heartbeat,
    HeartbeatFile,
    HeartbeatReader,
    heartbeat_path,
    read_heartbeat,
    read_heartbeats,
)

FIRST = Heartbeat(rank=0, host="h", pid=7, step=12, phase="step", at=1.5)


def test_what_is_written_is_read_also_after_the_run_directory_was_renamed(tmp_path):
    run_dir = tmp_path / "run"
    file, reader = HeartbeatFile(heartbeat_path(run_dir, 0)), HeartbeatReader(heartbeat_path(run_dir, 0), 7)
    assert reader.read() is None
    file.write(FIRST)
    assert reader.read() == FIRST and read_heartbeats(run_dir, 2) == [FIRST]
    os.rename(run_dir, tmp_path / "renamed")
    later = Heartbeat(0, "h", 7, 13, "save", 2.5)
    file.write(later)
    assert reader.read() == later
    reader.close()
    file.close()


def test_the_heartbeat_of_another_process_does_not_count(tmp_path):
    path = heartbeat_path(tmp_path, 0)
    file = HeartbeatFile(path)
    file.write(FIRST)
    assert HeartbeatReader(path, pid=8).read() is None
    file.close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 9000, '{"rank": 0}', '{"rank":0,"host":1,"pid":1,"step":1,"phase":"x","at":0}'],
)
def test_a_damaged_file_is_no_heartbeat(tmp_path, text):
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    assert read_heartbeat(path) is None
