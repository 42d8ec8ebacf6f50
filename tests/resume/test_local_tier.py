"""A killed run resumes from the checkpoints on its nodes, also when a node has lost its disk."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.equivalence import this_world
from tests.support.run_directories import assert_same_state, attempt, train_here
from tests.support.runs import OPTIMIZERS, tiny_run

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.local_tier import LocalTier
from meshwright.observe.metrics import read_metrics
from meshwright.rehearse.rank_pool import RankFailure, RankPool
from meshwright.spec import CheckpointSpec, ParallelSpec, PrecisionSpec, RunSpec, ScheduleSpec
from meshwright.spec.checkpoint import LocalSpec

KILLED_AT = 7


@pytest.fixture(scope="module")
def mortal():
    """A pool of its own: these ranks do not live long."""
    pool = RankPool(max_ranks=2)
    yield pool
    pool.close()


def _run() -> RunSpec:
    local = LocalSpec(save_every_steps=1, node_directory="$NODE_DISK", neighbour_copy=True)
    return tiny_run(
        "gqa",
        parallel=ParallelSpec(dp_shard=2, zero=1),
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5),
        precision=PrecisionSpec(compute="fp32"),
        schedule=ScheduleSpec(num_steps=9, kind="linear", warmup_steps=2),
        checkpoint=CheckpointSpec(every_steps=4, local=local),
    )


@pytest.fixture(scope="module")
def whole(mortal: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that is not killed."""
    place = tmp_path_factory.mktemp("whole")
    mortal.run(_mount_disk, 2, place)
    attempt(mortal, _run(), place / "run")
    assert not list(place.glob("node*/*")), "a run that has ended leaves nothing on its nodes"
    return place / "run"


def _mount_disk(place: Path) -> None:
    """Each rank is a node of its own."""
    disk = place / f"node{this_world().rank}"
    disk.mkdir(parents=True, exist_ok=True)
    os.environ["NODE_DISK"] = str(disk)


def _killed_while_it_saves(run: RunSpec, run_dir: Path) -> None:
    write = LocalTier.write

    def deadly(self: LocalTier, step: int, *rest: Any) -> Path:
        if step == KILLED_AT:  # the save of the step before is complete on all nodes
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, step, *rest)

    with patch.object(LocalTier, "write", deadly):
        train_here(run, run_dir)


@pytest.mark.parametrize(("lost", "resumed_at"), [(None, 6), (0, 6), (1, 6), ("all", 4)])
def test_a_killed_run_resumes_from_its_nodes_bitwise(
    mortal: RankPool, whole: Path, tmp_path: Path, lost: int | str | None, resumed_at: int
) -> None:
    run = _run()
    mortal.run(_mount_disk, 2, tmp_path)
    with pytest.raises(RankFailure):
        mortal.run(_killed_while_it_saves, 2, run, tmp_path / "parts")
    names = [path.name for path in complete_checkpoints(tmp_path / "parts" / "checkpoints")]
    assert names == ["step-00000004"]
    for node in (0, 1):
        if lost in (node, "all"):
            shutil.rmtree(next((tmp_path / f"node{node}").glob("meshwright-*")))
    mortal.run(_mount_disk, 2, tmp_path)
    again = attempt(mortal, run, tmp_path / "parts")
    assert len(again.sample_ids) == 9 - resumed_at
    assert_same_state(tmp_path / "parts", whole)
    assert [row["step"] for row in read_metrics(tmp_path / "parts")] == list(range(1, 10))
    assert "local_checkpoint" in (tmp_path / "parts/events-0.jsonl").read_text()
    assert not list(tmp_path.glob("node*/*"))
