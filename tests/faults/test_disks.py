"""A full disk, a read-only one, damaged checkpoints and a clock that jumps, in a live run on two ranks.

Nothing but the damaged checkpoints ends a rank: training goes on, what was published opens, and the result is
that of the undisturbed run.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.support.clocks import ShiftedClock, lacking_clock
from tests.support.fault_table import Trial
from tests.support.faults import events, is_training, require_newest_opens, restarted, survive
from tests.support.live_runs import Launcher, newest_step, ranks_of, wait_for, wait_for_checkpoint

from meshwright.checkpoint.load import complete_checkpoints

DAY = 86_400


@contextmanager
def own_disk(run_dir: Path) -> Iterator[None]:
    """`checkpoints` of the run directory is a file system of its own."""
    folder = run_dir / "checkpoints"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"DISKS NOT TRIED: needs the right to mount a tmpfs: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


def _remount(run_dir: Path, option: str) -> bool:
    """Whether the file system has this option now; one that is written cannot become read-only."""
    command = ["mount", "-o", f"remount,{option}", run_dir / "checkpoints"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _shrink(run_dir: Path) -> bool:
    """Leave room for three and a half checkpoints, of which three are kept."""
    newest = complete_checkpoints(run_dir / "checkpoints")[-1]
    kilobytes = sum(path.stat().st_blocks for path in newest.iterdir()) // 2
    return _remount(run_dir, f"size={kilobytes * 7 // 2}k")


def _disk_fails(launcher: Launcher, run_dir: Path, rng: random.Random, *, fault: str, text: str) -> Trial:
    """Saves fail until the disk is repaired; the run reports it, trains on, and saves again afterwards."""
    num_restarts = len(events(run_dir, "restart"))
    spoil = partial(_shrink, run_dir) if "full" in fault else partial(_remount, run_dir, "ro")
    repair = "size=100m" if "full" in fault else "rw"
    before = len(_warnings(run_dir, text))
    try:
        _retried(spoil, launcher)
        failed_at = time.time()
        wait_for(lambda: len(_warnings(run_dir, text)) > before, launcher)
        detect_seconds = time.time() - failed_at
        require_newest_opens(run_dir)
    finally:
        _retried(partial(_remount, run_dir, repair), None)
    repaired_at, step = time.time(), newest_step(run_dir)
    wait_for_checkpoint(run_dir, launcher, step=step + 1)
    assert len(events(run_dir, "restart")) == num_restarts, "a save that fails ends no rank"
    return Trial(fault, 0, detect_seconds, time.time() - repaired_at)


def _retried(action: Callable[[], bool], launcher: Launcher | None) -> None:
    """Files vanish while they are counted, and a disk that is written stays writable: try again."""

    def is_done() -> bool:
        try:
            return action()
        except OSError:
            return False

    wait_for(is_done, launcher)


def _warnings(run_dir: Path, text: str) -> list[str]:
    return [event["text"] for event in events(run_dir, "warning") if text in event["text"]]


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def _shard_damaged(
    launcher: Launcher, run_dir: Path, rng: random.Random, *, fault: str, damage: Callable[[Path], None]
) -> Trial:
    """The newest checkpoint is damaged, and all ranks are killed: the run goes on from the one before."""
    wait_for(
        lambda: is_training(run_dir) and len(complete_checkpoints(run_dir / "checkpoints")) > 1, launcher
    )
    launcher.send_signal(signal.SIGSTOP)  # nobody restarts the ranks, and nothing newer is published
    ranks = ranks_of(launcher)
    for rank in ranks:
        rank.suspend()
    before, newest = complete_checkpoints(run_dir / "checkpoints")[-2:]
    damage(rng.choice(sorted(newest.glob("*.safetensors"))))

    def kill() -> None:
        for rank in ranks:
            rank.kill()
        launcher.send_signal(signal.SIGCONT)

    trial = restarted(launcher, run_dir, fault, kill, opens=False)
    resumed = events(run_dir, "resume")[-1]["step"]
    assert f"step-{resumed:08d}" == before.name
    assert f"{newest} is damaged and skipped" in launcher.printed
    assert _warnings(run_dir, f"{newest.name} is damaged and was skipped")
    restart = events(run_dir, "restart")[-1]
    return replace(trial, lost_steps=restart["step"] + restart["lost_steps"] - resumed)


def _clock_jumps(
    launcher: Launcher, run_dir: Path, rng: random.Random, *, clock: ShiftedClock, days: int
) -> Trial:
    """Nobody notices: two more checkpoints are published, and no rank is restarted. Then one is killed."""
    num_restarts = len(events(run_dir, "restart"))
    clock.set(days * DAY)
    for _ in range(2):
        wait_for_checkpoint(run_dir, launcher, step=newest_step(run_dir) + 1)
    assert len(events(run_dir, "restart")) == num_restarts, "a jump is no hang"
    fault = f"wall clock jumps by {days:+d} days, then kill -9 of one rank"
    return restarted(launcher, run_dir, fault, ranks_of(launcher)[0].kill)


def test_disks_damaged_shards_and_a_clock_that_jumps(tmp_path, undisturbed, record):
    """Six faults in one run."""
    faults = [
        partial(_disk_fails, fault="disk full", text="No space left on device"),
        partial(_disk_fails, fault="disk becomes read-only", text="Read-only file system"),
        partial(_shard_damaged, fault="newest checkpoint has a truncated shard, kill -9", damage=_truncate),
        partial(_shard_damaged, fault="newest checkpoint has a flipped bit, kill -9", damage=_flip_a_bit),
    ]
    environment = dict(os.environ)
    if not lacking_clock():
        clock = ShiftedClock(tmp_path)
        environment |= clock.environment()
        faults += [partial(_clock_jumps, clock=clock, days=days) for days in (2, -3)]
    rng = random.Random(1)
    survive(faults, tmp_path, undisturbed, rng=rng, env=environment, place=own_disk, report=record)
    if lacking_clock():
        pytest.skip(f"CLOCK NOT TRIED: {lacking_clock()}")
