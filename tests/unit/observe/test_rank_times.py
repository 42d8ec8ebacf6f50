"""ranks.jsonl: means of steps, at a bounded rate, and the slowest rank first."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tests.support.shrunk_families import shrunk_family

from meshwright.mesh import World
from meshwright.models.layers.attention import Attention
from meshwright.observe.metrics import read_metrics
from meshwright.observe.rank_times import RankFigures, RankTimesWriter, read_rank_times
from meshwright.parallel.program import SingleProgram
from meshwright.spec import RunSpec
from meshwright.train.loop import train


def figures(*own: float) -> RankFigures:
    return RankFigures(np.array(own), np.full(len(own), 0.01), np.full(len(own), 2.0**30))


def test_a_line_is_the_mean_of_the_steps_since_the_last(tmp_path: Path):
    now = 0.0
    with RankTimesWriter(tmp_path, clock=lambda: now) as writer:
        for step, seconds in enumerate((1.0, 1.0, 3.0, 5.0), start=1):
            writer.write(step, figures(seconds, 2 * seconds))
            now += 0.4
    found = read_rank_times(tmp_path)
    assert found.steps == [1, 4]
    assert found.own_seconds.tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert found.slowest_first == [1, 0]


def test_a_resumed_run_goes_on_after_its_restored_step(tmp_path: Path):
    for restored in (0, 2):
        with RankTimesWriter(
            tmp_path, restored_step=restored, clock=iter(range(0, 1000, 10)).__next__
        ) as writer:
            for step in range(restored + 1, restored + 4):
                writer.write(step, figures(1.0, 1.0))
    assert read_rank_times(tmp_path).steps == [1, 2, 3, 4, 5]


def test_a_rollback_removes_the_lines_after_its_checkpoint(tmp_path: Path):
    with RankTimesWriter(tmp_path, clock=iter(range(0, 1000, 10)).__next__) as writer:
        for step in (1, 2, 3):
            writer.write(step, figures(1.0, 1.0))
        writer.rewind(1)
        writer.write(2, figures(5.0, 5.0))
    found = read_rank_times(tmp_path)
    assert found.steps == [1, 2] and found.own_seconds.tolist() == [[1.0, 1.0], [5.0, 5.0]]


def test_times_that_are_not_measured_rank_nobody(tmp_path: Path):
    with RankTimesWriter(tmp_path) as writer:
        writer.write(1, figures(np.nan, np.nan))
    found = read_rank_times(tmp_path)
    assert found.slowest_first == [] and found.peak_bytes.tolist() == [[2.0**30, 2.0**30]]


def test_damaged_lines_and_absent_files_are_left_out(tmp_path: Path):
    assert read_rank_times(tmp_path).steps == []
    with RankTimesWriter(tmp_path) as writer:
        writer.write(7, figures(1.0, 2.0))
    with (tmp_path / "ranks.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "own_seconds": ["x"]}\n{"step": 9')
    assert read_rank_times(tmp_path).steps == [7]


def test_one_rank_has_no_file(tmp_path: Path):
    with RankTimesWriter(tmp_path) as writer:
        writer.write(1, figures(1.0))
    assert not (tmp_path / "ranks.jsonl").exists()


def _trained_with_a_slow_rank(run: RunSpec, run_dir: Path, slow: int, seconds: float) -> None:
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    fast = SingleProgram._loss

    def loss(self: Any, *arguments: Any) -> Any:
        time.sleep(seconds if rank == slow else 0.0)
        return fast(self, *arguments)

    with patch.object(SingleProgram, "_loss", loss):
        train(run, world, run_dir, quiet=True)


def test_a_slow_rank_is_first(ranks, tmp_path: Path):
    run = RunSpec.model_validate(
        {
            "device": "cpu",
            "model": shrunk_family("llama-3.1-8b", vocab_size=257, num_layers=1).model_dump(),
            "parallel": {"dp_replicate": 2},
            "schedule": {"num_steps": 8},
            "data": {"synthetic": {"num_documents": 4}, "sequence_length": 16, "batch_sequences": 4},
        }
    )
    slowness = 0.3
    ranks.run(_trained_with_a_slow_rank, 2, run, tmp_path, 1, slowness)
    found = read_rank_times(tmp_path)
    assert found.slowest_first == [1, 0]
    gap = np.median(found.own_seconds[1:, 1] - found.own_seconds[1:, 0])
    assert gap > 0.5 * slowness  # the fast rank waits, and that is not its own time
    row = read_metrics(tmp_path)[-1]
    assert 0 <= row["reduce_wait_seconds"] < row["step_seconds"] - 0.5 * slowness


def test_a_slow_rank_is_first_under_zero_3(ranks, tmp_path: Path):
    """All ranks wait for each other's parameters in every block: only the waits tell who is slow."""
    run = RunSpec.model_validate(
        {
            "device": "cpu",
            "model": shrunk_family("llama-3.1-8b", vocab_size=257, num_layers=2).model_dump(),
            "parallel": {"dp_shard": 2, "zero": 3},
            "schedule": {"num_steps": 6},
            "data": {"synthetic": {"num_documents": 4}, "sequence_length": 16, "batch_sequences": 4},
        }
    )
    slowness = 0.3
    ranks.run(_trained_with_a_slow_block, 2, run, tmp_path, 1, slowness)
    found = read_rank_times(tmp_path)
    assert found.slowest_first == [1, 0]
    gap = np.median(found.own_seconds[1:, 1] - found.own_seconds[1:, 0])
    assert gap > 0.5 * slowness


def _trained_with_a_slow_block(run: RunSpec, run_dir: Path, slow: int, seconds: float) -> None:
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    fast = Attention.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds / run.model.num_layers if rank == slow else 0.0)
        return fast(self, *arguments, **named)

    with patch.object(Attention, "forward", forward):
        train(run, world, run_dir, quiet=True)
