"""Compiled blocks between NCCL ranks on one card equal one eager device in float64."""

import pytest
import torch
from tests.equivalence.test_compiled import EACH_AXIS, ONE_DEVICE, each, prove
from tests.support.layouts import Layout

from meshwright.rehearse.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@each([*ONE_DEVICE, *EACH_AXIS])
def test_each_kind_and_each_axis(nccl_ranks: RankPool, layout: Layout) -> None:
    prove(nccl_ranks, layout, device="cuda", num_steps=2)
