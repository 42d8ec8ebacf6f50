"""One flipped bit in the weights of one replica is found, and its rank is named."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.support.run_directories import train_here
from tests.support.runs import tiny_run

from meshwright.errors import LostRank
from meshwright.ops.bit_hash import hash_of
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train import loop


def run_of(parallel: ParallelSpec) -> RunSpec:
    run = tiny_run(parallel=parallel)
    return run.with_(resilience=run.resilience.with_(compare_replicas_every_steps=2))


def train_with_a_flip(run: RunSpec, run_dir: Path, rank: int | None) -> str:
    """Train; before step 3 one bit of one weight of a rank flips. Returns the error, or the outcome."""
    train_step, num_calls = loop.train_step, iter(range(100))

    def step(training, batch, **options):
        if next(num_calls) == 2 and torch.distributed.get_rank() == rank:
            weight = next(iter(training.named_shards.values()))
            weight.data.view(torch.int64).flatten()[0] ^= 1
        return train_step(training, batch, **options)

    with patch.object(loop, "train_step", step):
        try:
            return train_here(run, run_dir).kind
        except LostRank as error:
            return str(error)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_flipped_bit_of_a_replica_is_found(ranks, tmp_path, rank):
    run = run_of(ParallelSpec(dp_replicate=4))
    found = ranks.run(train_with_a_flip, 4, run, tmp_path, rank)
    if rank is None:
        assert set(found) == {"finished"}
    else:
        assert all("the weights of replicas differ after step 4: rank 2 on " in text for text in found)
        assert all("against the others" in text for text in found)


def test_shards_of_zero_are_compared_with_their_replicas_only(ranks, tmp_path):
    run = run_of(ParallelSpec(dp_replicate=2, dp_shard=2, zero=3))
    found = ranks.run(train_with_a_flip, 4, run, tmp_path, 3)
    assert all("differ after step 4: rank 1 on " in text and ", rank 3 on " in text for text in found)
    assert all("against each other" in text and "rank 0" not in text for text in found)


def test_every_bit_changes_the_hash():
    weights = [torch.randn(3, 5), torch.randn(4).to(torch.bfloat16)]
    before = hash_of(weights)
    for bit in range(16):
        weights[1].view(torch.int16)[2] ^= 1 << bit if bit < 15 else -(2**15)
        assert not torch.equal(hash_of(weights), before)
        weights[1].view(torch.int16)[2] ^= 1 << bit if bit < 15 else -(2**15)
    assert torch.equal(hash_of(weights), before)
