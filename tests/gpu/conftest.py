"""Ranks on one CUDA card, talking NCCL."""

import pytest
import torch

from meshwright.rehearse.rank_pool import RankPool

# No job on a card computes this long, and minutes on it are dear.
JOB_SECONDS = 25.0
GRACE_SECONDS = 5.0


@pytest.fixture(scope="session")
def nccl_ranks():
    """Like `ranks`, on cuda:0 with NCCL."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pool = RankPool(max_ranks=4, device="cuda", job_seconds=JOB_SECONDS, grace_seconds=GRACE_SECONDS)
    yield pool
    pool.close()
