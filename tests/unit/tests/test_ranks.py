"""The pool that every distributed test stands on."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankFailure


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
