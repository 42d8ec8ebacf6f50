"""Batch norm over NCCL ranks equals one batch norm, and modules from elsewhere equal a plain loop."""

import pytest
import torch
from tests.own_modules import differences, fit_spec, parallel, recompute, reference, train_cases
from tests.unit.ops.test_batch_norm import SPLITS, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("split", SPLITS)
def test_equals_one_process(nccl_ranks, split):
    check(nccl_ranks, "2d", SPLITS[split])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_convolutional_network_equals_one_device(nccl_ranks, zero):
    axes = parallel(dp_shard=2, zero=zero) if zero else parallel(dp_replicate=2)
    spec = fit_spec(
        microbatch_samples=4,
        sync_batch_norm=True,
        parallel=axes,
        memory=recompute("full"),
        device="cuda",
    )
    expected = reference("cnn", "sgd")
    for (course,) in nccl_ranks.run(train_cases, 2, "cnn", [spec]):
        errors = differences(course, expected)
        assert max(errors.values()) <= 1e-9, max(errors, key=errors.get)
