"""A run that is killed at any time, and started again, is the run that was not killed."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.equivalence import this_world
from tests.support.run_directories import (
    assert_same_state,
    attempt,
    dying_at_disk_call,
    killed_after,
    last_checkpoint,
    train_here,
)
from tests.support.runs import OPTIMIZERS, tiny_run
from tests.support.soak import soak

from meshwright.checkpoint import save
from meshwright.checkpoint.load import complete_checkpoints
from meshwright.errors import CheckpointError, RunError
from meshwright.observe.metrics import read_metrics
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import CheckpointSpec, ParallelSpec, PrecisionSpec, RunSpec, ScheduleSpec

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
TWO_RANKS = ParallelSpec(dp_shard=2, zero=1)


@pytest.fixture(scope="module")
def mortal():
    """A pool of its own: these ranks do not live long."""
    pool = RankPool(max_ranks=2)
    yield pool
    pool.close()


def saving_run(
    parallel: ParallelSpec, *, num_steps: int = 6, every_steps: int = 2, keep_last: int = 2
) -> RunSpec:
    return tiny_run(
        "gqa",
        parallel=parallel,
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5),
        precision=PrecisionSpec(compute="fp32"),
        schedule=ScheduleSpec(num_steps=num_steps, kind="linear", warmup_steps=2),
        checkpoint=CheckpointSpec(every_steps=every_steps, keep_last=keep_last),
    )


def killed_until_done(mortal: RankPool, run: RunSpec, folder: Path, seed: int, num_kills: int) -> list[float]:
    """Kill after random times; then let it finish. Returns the times."""
    generator = random.Random(seed)
    started_at = time.monotonic()
    attempt(mortal, run, folder / "whole")
    whole_seconds = time.monotonic() - started_at
    times = [generator.uniform(0.0, whole_seconds) for _ in range(num_kills)]
    for seconds in times:
        with killed_after(mortal, seconds):
            attempt(mortal, run, folder / "parts")
    attempt(mortal, run, folder / "parts")
    return times


def check_kills(mortal: RankPool, folder: Path, seed: int, num_kills: int) -> None:
    run = saving_run(TWO_RANKS, num_steps=20, every_steps=1)
    times = killed_until_done(mortal, run, folder, seed, num_kills)
    print(f"seed {seed}: killed after {[round(seconds, 3) for seconds in times]} seconds")
    assert_same_state(folder / "parts", folder / "whole")
    assert [row["step"] for row in read_metrics(folder / "parts")] == list(range(1, 21))
    assert len(complete_checkpoints(folder / "parts" / "checkpoints")) == 2


def test_killed_at_random_times(mortal, tmp_path):
    check_kills(mortal, tmp_path, SEED, num_kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(12))
def test_killed_at_many_random_times(mortal, tmp_path, trial):
    """Another seed: MESHWRIGHT_TEST_SEED=2 make soak."""
    check_kills(mortal, tmp_path, 1000 * SEED + trial, num_kills=8)


def _die_at_disk_call(run: RunSpec, run_dir: Path, fatal_call: int) -> int:
    """Train and kill this process at the n-th change of the disk by a save; returns how many there were."""
    with dying_at_disk_call(fatal_call) as count:
        train_here(run, run_dir)
    return count[0]


@pytest.mark.parametrize("stride", [5, soak(1)])
def test_killed_in_the_middle_of_a_save(mortal, tmp_path, stride):
    """At changes of the disk, in order: what is published is complete, and the run resumes."""
    run = saving_run(ParallelSpec(), num_steps=3, every_steps=1).with_(
        checkpoint=CheckpointSpec(every_steps=1, keep_last=1)
    )
    attempt(mortal, run, tmp_path / "whole")
    num_calls = mortal.run(_die_at_disk_call, 1, run, tmp_path / "counted", -1)[0]
    assert num_calls > 12
    for fatal_call in range(0, num_calls, stride):
        folder = tmp_path / f"call-{fatal_call}"
        with killed_after(mortal, 60.0):
            mortal.run(_die_at_disk_call, 1, run, folder, fatal_call)
        attempt(mortal, run, folder)
        assert_same_state(folder, tmp_path / "whole")


def test_a_half_written_checkpoint_does_not_count(ranks, tmp_path):
    run = saving_run(ParallelSpec())
    attempt(ranks, run, tmp_path, stop_after=3)
    newest = last_checkpoint(tmp_path)
    assert newest.name == "step-00000003"
    (newest / "manifest.json").unlink()
    again = attempt(ranks, run, tmp_path)
    assert len(again.sample_ids) == 4  # from step 2 on


def _refusal(run: RunSpec, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        train_here(run, run_dir)
    return caught.value.fact


@pytest.mark.parametrize("damage", ("flipped", "cut", "missing", "manifest"))
def test_a_damaged_checkpoint_is_refused_by_all_ranks(ranks, tmp_path, damage):
    run = saving_run(TWO_RANKS)
    attempt(ranks, run, tmp_path, stop_after=2)
    shard = sorted(last_checkpoint(tmp_path).glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "cut":
        shard.write_bytes(content[:-1])
    elif damage == "missing":
        shard.unlink()
    else:
        (shard.parent / "manifest.json").write_text('{"version": 1, "fil')
    facts = set(ranks.run(_refusal, 2, run, tmp_path))
    assert len(facts) == 1
    expected = (
        "manifest.json is damaged" if damage == "manifest" else f"{shard.name} differs from the manifest"
    )
    assert facts.pop().startswith(expected)


@pytest.fixture(scope="module")
def whole_and_stopped(ranks, tmp_path_factory):
    """The directories of a run that was not stopped, and of one that was after step 5."""
    folder = tmp_path_factory.mktemp("undamaged")
    run = saving_run(TWO_RANKS)
    attempt(ranks, run, folder / "whole")
    attempt(ranks, run, folder / "stopped", stop_after=5)
    return folder / "whole", folder / "stopped"


@pytest.mark.parametrize("damage", ("flipped", "cut", "manifest", "index", "state"))
def test_a_damaged_newest_falls_back_to_the_one_before(ranks, tmp_path, whole_and_stopped, damage):
    """By itself, on all ranks; the run then equals the undamaged one, and the damaged folder is replaced."""
    run, (whole, stopped) = saving_run(TWO_RANKS), whole_and_stopped
    shutil.copytree(stopped, tmp_path / "parts")
    newest = last_checkpoint(tmp_path / "parts")
    assert newest.name == "step-00000005"
    if damage in ("flipped", "cut"):
        shard = sorted(newest.glob("*.safetensors"))[-1]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content if damage == "flipped" else content[:-1])
    elif damage == "index":
        (newest / "index.json").write_text("{}")
    else:
        manifest = json.loads((newest / "manifest.json").read_text())
        manifest["state"] = {"step": "five"}
        text = json.dumps(manifest) if damage == "state" else '{"version": 2, "fil'
        (newest / "manifest.json").write_text(text)
    again = attempt(ranks, run, tmp_path / "parts")
    assert len(again.sample_ids) == 2  # from step 4 on
    assert_same_state(tmp_path / "parts", whole)
    assert "step-00000005 is damaged and was skipped" in (tmp_path / "parts/events-1.jsonl").read_text()
    names = [path.name for path in complete_checkpoints(tmp_path / "parts" / "checkpoints")]
    assert names == ["step-00000004", "step-00000006"]


def _read_only_until_the_end(run: RunSpec, run_dir: Path) -> str:
    """Every save fails; training goes on to the last step, whose save is an error."""

    def read_only(path: Path, tensors: Any) -> Any:
        raise OSError(30, "Read-only file system")

    with patch.object(save, "write_shard_file", read_only), pytest.raises(RunError) as caught:
        train_here(run, run_dir)
    return caught.value.fact


def test_a_run_whose_last_save_fails_has_failed(ranks, tmp_path):
    facts = ranks.run(_read_only_until_the_end, 2, saving_run(TWO_RANKS), tmp_path)
    assert facts == ["the last save failed: rank 0: OSError: Read-only file system"] * 2
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 7))


def _fail_to_save_once(run: RunSpec, run_dir: Path) -> tuple[str, int, list[str]]:
    """The disk of rank 1 is full while step 2 is saved."""
    write_shard_file = save.write_shard_file

    def full_disk(path: Path, tensors: Any) -> Any:
        if "partial-00000002" in str(path) and this_world().rank == 1:
            raise OSError(28, "No space left on device")
        return write_shard_file(path, tensors)

    with patch.object(save, "write_shard_file", full_disk):
        result = train_here(run, run_dir)
    names = sorted(path.name for path in complete_checkpoints(run_dir / "checkpoints"))
    return result.kind, result.step, names


def test_a_failed_save_is_a_warning_on_all_ranks_and_training_continues(ranks, tmp_path):
    results = ranks.run(_fail_to_save_once, 2, saving_run(TWO_RANKS), tmp_path)
    assert results == [("finished", 6, ["step-00000004", "step-00000006"])] * 2
    assert not list((tmp_path / "checkpoints").glob(".partial*")), "a full disk stays full of what is left"
    found = [path.name for path in tmp_path.glob("events-*.jsonl") if "No space left" in path.read_text()]
    assert sorted(found) == ["events-0.jsonl", "events-1.jsonl"]
