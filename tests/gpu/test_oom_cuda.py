"""An OOM of one of two NCCL ranks on one card: the launcher ends both and starts them anew."""

import pytest
import torch
from tests.resume.test_oom import HALVE, final_tensors, oom, run_of, train  # noqa: F401 (oom is a fixture)
from tests.support.equivalence import RTOL, worst_errors

from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.oom_restart import smaller_microbatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _run() -> RunSpec:
    return run_of(memory=HALVE).with_(device="cuda", parallel=ParallelSpec(tp=2))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ranks_that_wait_for_one_without_memory_are_ended(oom, tmp_path, place):  # noqa: F811
    """The other rank waits in a collective of the card, and its host for the card."""
    oom(place, 1, 1)
    code, run_dir = train(_run(), tmp_path)
    assert code == 0
    small = smaller_microbatch(_run())
    assert small is not None
    code, small_dir = train(small, tmp_path, "small")
    assert code == 0
    assert max(worst_errors(final_tensors(run_dir), final_tensors(small_dir)).values()) < RTOL
