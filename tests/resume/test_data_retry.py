"""A batch that one rank cannot read is read again inside the process; the result is the same."""

from pathlib import Path
from unittest.mock import patch

import pytest
from tests.support.equivalence import this_world
from tests.support.run_directories import Attempt, assert_same_state, train_here
from tests.support.runs import tiny_run

from meshwright.data import batches
from meshwright.errors import DataError, LostRank
from meshwright.observe.events import events_path, read_events
from meshwright.spec import ParallelSpec, RunSpec

BROKEN_BATCH = 3


def train_with_bad_reads(run: RunSpec, run_dir: Path, rank: int, num_failures: int) -> Attempt | str:
    """Train; the first reads of batch 3 fail on a rank. Returns the attempt, or its error."""
    read, world, failures = batches.Batches._batch, this_world(), iter(range(num_failures))

    def unreliable(self, index, position, count):
        is_here = world.rank == rank
        if is_here and index == BROKEN_BATCH and next(failures, None) is not None:
            raise OSError("Stale file handle")
        return read(self, index, position, count)

    with patch.object(batches.Batches, "_batch", unreliable):
        try:
            return train_here(run, run_dir)
        except (OSError, LostRank, DataError) as error:
            return f"{type(error).__name__}: {error}"


def run_of(**resilience: int) -> RunSpec:
    run = tiny_run(parallel=ParallelSpec(dp_shard=2, zero=1))
    return run.with_(resilience=run.resilience.with_(**resilience))


def test_a_failed_read_is_repeated_and_the_result_is_that_of_an_undisturbed_run(ranks, tmp_path):
    whole = ranks.run(train_here, 2, run_of(), tmp_path / "whole")
    found = ranks.run(train_with_bad_reads, 2, run_of(), tmp_path / "disturbed", 1, 2)
    assert [one.sample_ids for one in found] == [one.sample_ids for one in whole]
    assert_same_state(tmp_path / "whole", tmp_path / "disturbed")
    for rank in (0, 1):
        texts = [one.get("text") for one in read_events(events_path(tmp_path / "disturbed", rank))]
        start = "the batch after step 3 cannot be read: rank 1: Stale file handle; it is read again in "
        assert f"{start}1 s (1 of 3)" in texts and f"{start}2 s (2 of 3)" in texts


@pytest.mark.parametrize("retries", [0, 1])
def test_a_read_that_fails_for_good_ends_all_ranks(ranks, tmp_path, retries):
    found = ranks.run(train_with_bad_reads, 2, run_of(data_retries=retries), tmp_path, 1, 1000)
    assert found[1] == "OSError: Stale file handle"
    fact = "the batch after step 3 cannot be read: rank 1: Stale file handle"
    assert str(found[0]).startswith(f"LostRank: data: {fact}")
