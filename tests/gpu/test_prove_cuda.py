"""The proof with NCCL ranks on one card, and a back-off from a shortage of memory between them."""

import pytest
import torch
from tests.harness import RTOL, worst_errors
from tests.resume.test_shortage import BACK_OFF, final_tensors, run_of, train
from tests.unit.rehearse.test_prove import large_run

from meshwright.rehearse.prove import prove
from meshwright.rehearse.shrink import shrink
from meshwright.spec import MemorySpec, ParallelSpec
from meshwright.train.out_of_memory import smaller_microbatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = {
    "tp_pp": large_run("llama-3.1-8b", ParallelSpec(pp=2, tp=8), memory=MemorySpec(recompute="full")),
    "zero_3_cp": large_run("llama-3.1-8b", ParallelSpec(dp_shard=64, zero=3, cp=8, cp_kind="ring")),
    "ep": large_run("qwen3-30b-a3b", ParallelSpec(dp_shard=64, zero=3, ep=64)),
}


@pytest.mark.parametrize("case", LARGE)
def test_nccl_ranks_on_one_card_equal_one_device(case):
    (verdict,) = prove(shrink(LARGE[case], max_ranks=4), ranks=("cuda",))
    print(verdict.line)
    assert verdict.holds, verdict.line


@pytest.mark.parametrize("layout", ["replicas", "zero_3", "tp", "pp"])
def test_a_back_off_between_nccl_ranks(nccl_ranks, tmp_path, layout):
    """A partner waits on the card for the rank that is short; that collective has to be ended."""
    run = run_of(layout, memory=BACK_OFF, device="cuda")
    train(nccl_ranks, run, tmp_path / "short", 1, 2)
    train(nccl_ranks, smaller_microbatch(run), tmp_path / "small")
    # fp64; the order of sums inside a kernel may differ from run to run.
    assert (
        max(worst_errors(final_tensors(tmp_path / "short"), final_tensors(tmp_path / "small")).values())
        < RTOL
    )
