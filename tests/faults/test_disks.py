"""Disks that are full or read-only, as real file systems: training goes on, and what was published opens."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.test_lost_files import after_step
from tests.support.run_files import write_run_file

from meshwright.checkpoint.load import complete_checkpoints, read_manifest, verify_files
from meshwright.cli.main import run
from meshwright.observe.metrics import read_metrics

Captured = pytest.CaptureFixture[str]
SAVING = {"checkpoint": {"every_steps": 1, "keep_last": 1}}


def mount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=True, capture_output=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """`checkpoints` of the run directory `run` is a file system of its own."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    try:
        mount(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a tmpfs: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def train(tmp_path: Path) -> int:
    file = write_run_file(tmp_path / "run.yaml", **SAVING)
    return run(["train", file, "--dir", str(tmp_path / "run")])


def require_intact(disk: Path) -> None:
    (folder,) = complete_checkpoints(disk)
    verify_files(folder, read_manifest(folder))
    assert not list(disk.glob(".partial*"))


def used_kilobytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024


def test_a_full_disk(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """There is room for one checkpoint and a half."""
    file = write_run_file(tmp_path / "run.yaml", **SAVING)
    assert run(["train", file, "--dir", str(tmp_path / "run"), "--stop-after", "1"]) == 0
    remount(disk, f"size={used_kilobytes(disk) * 3 // 2}k")
    assert train(tmp_path) == 4
    printed = capsys.readouterr().err
    assert "training continues and tries again" in printed and "No space left on device" in printed
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    require_intact(disk)
    remount(disk, "size=100m")
    assert train(tmp_path) == 0
    assert "resumed at step 1" in capsys.readouterr().err
    require_intact(disk)


def test_a_disk_that_becomes_read_only(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = write_run_file(tmp_path / "run.yaml", **SAVING)
    assert run(["train", file, "--dir", str(tmp_path / "run"), "--stop-after", "1"]) == 0
    with monkeypatch.context() as patched:
        after_step(patched, 1, lambda: remount(disk, "ro"))
        assert train(tmp_path) == 4
    assert "Read-only file system" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    remount(disk, "rw")
    require_intact(disk)
    assert train(tmp_path) == 0
    assert "resumed at step 1" in capsys.readouterr().err
