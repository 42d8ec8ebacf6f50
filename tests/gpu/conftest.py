"""Ranks on one CUDA card, talking NCCL."""

import pytest
import torch
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def nccl_ranks():
    """Like `ranks`, on cuda:0 with NCCL."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pool = RankPool(max_ranks=4, device="cuda")
    yield pool
    pool.close()
