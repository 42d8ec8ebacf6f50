"""Data parallel in all its stages equals one device."""

import pytest
from tests.harness import prove
from tests.tiny_runs import OPTIMIZERS, tiny_run

from meshwright.spec import ParallelSpec

STAGES = {
    "replicate_2": ParallelSpec(dp_replicate=2),
    "replicate_4": ParallelSpec(dp_replicate=4),
    **{f"zero_{stage}": ParallelSpec(dp_shard=4, zero=stage) for stage in (1, 2, 3)},
    **{f"hybrid_zero_{stage}": ParallelSpec(dp_replicate=2, dp_shard=2, zero=stage) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_equals_one_device(ranks, stage, optim):
    prove(ranks, tiny_run("tied", parallel=STAGES[stage], optim=optim))
