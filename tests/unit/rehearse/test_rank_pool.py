"""The pool of local ranks, which distributed tests and proofs run on."""

import signal
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.rehearse.rank_pool import RankFailure, RankPool


def _sum_of_ranks(offset: int) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def _fails_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def test_worlds_of_any_size_follow_each_other(ranks) -> None:
    assert [int(t) for t in ranks.run(_sum_of_ranks, 3, 10)] == [33, 33, 33]
    assert [int(t) for t in ranks.run(_sum_of_ranks, 2, 0)] == [1, 1]


def test_a_failing_rank_is_named_and_the_pool_recovers(ranks) -> None:
    with pytest.raises(RankFailure, match=r"rank 1:[\s\S]*planted"):
        ranks.run(_fails_on_rank_one, 2)
    assert len(ranks.run(_sum_of_ranks, 2, 0)) == 2


def _sleep_for_long(takes_signals: bool):
    if not takes_signals:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    time.sleep(100)


@pytest.mark.parametrize("takes_signals", [True, False])
def test_silent_ranks_are_killed_and_their_tracebacks_reported(takes_signals):
    """Also when no signal reaches them, as in a driver that holds a thread."""
    with RankPool(max_ranks=1, job_seconds=3.0, grace_seconds=2.0) as pool:
        with pytest.raises(RankFailure, match="no answer from ranks") as caught:
            pool.run(_sleep_for_long, 1, takes_signals)
        assert "in _sleep_for_long" in str(caught.value)
        assert "threads: " in str(caught.value)
        assert pool.process_ids == []
