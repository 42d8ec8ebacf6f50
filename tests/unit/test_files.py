"""Files of others: bounded, never blocking; drafts that killed processes left are removed."""

import json
import os
import socket
from pathlib import Path

import pytest

from meshwright.files import new_folder_beside, read_bounded, read_json_file, read_text


def test_sizes_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x" * 100)
    assert read_bounded(file, max_bytes=100) == b"x" * 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_bounded(file, max_bytes=99)
    with pytest.raises(OSError, match="larger than 1 MiB"):
        read_bounded(_large(tmp_path), max_bytes=1 << 20)


def _large(folder: Path) -> Path:
    file = folder / "large"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse
    return file


def test_pipes_devices_and_folders_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_bounded(path, max_bytes=10)


def test_deep_json_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json_file(tmp_path / "deep.json", max_bytes=1 << 20)
    (tmp_path / "fine.json").write_text(json.dumps({"a": 1}))
    assert read_json_file(tmp_path / "fine.json", max_bytes=100) == {"a": 1}
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(tmp_path / "text") == "hello"


def test_drafts_of_dead_processes_go_and_all_others_stay(tmp_path: Path) -> None:
    host, target = socket.gethostname(), tmp_path / "out"
    dead = tmp_path / f".out.partial-{host}-{2**22 + 1}-abc"  # above the largest process id of Linux
    kept = [
        tmp_path / f".out.partial-{host}-{os.getpid()}-abc",
        tmp_path / ".out.partial-another.host-7-abc",
        tmp_path / ".out.partial",
        tmp_path / f".other.partial-{host}-{2**22 + 1}-abc",
    ]
    for folder in (dead, *kept):
        folder.mkdir()
    made = new_folder_beside(target)
    assert not dead.exists()
    assert all(folder.is_dir() for folder in (*kept, made))
