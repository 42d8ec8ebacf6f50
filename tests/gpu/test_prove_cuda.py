"""The proof with NCCL ranks on one GPU."""

import pytest
import torch
from tests.unit.rehearse.test_prove import large_run

from meshwright.rehearse.prove import prove
from meshwright.rehearse.shrink import shrink
from meshwright.spec import MemorySpec, ParallelSpec

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
def test_nccl_ranks_on_one_gpu_equal_one_device(case):
    (verdict,) = prove(shrink(LARGE[case], max_ranks=4), ranks=("cuda",))
    print(verdict.line)
    assert verdict.holds, verdict.line
