"""Batch norm over NCCL ranks equals one batch norm, and modules from elsewhere equal a plain loop."""

import pytest
import torch
from tests.support.module_training import (
    fit_spec,
    join_stages,
    parallel,
    recompute,
    relative_errors,
    train_cases,
    train_plain_loop,
)
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
    expected = train_plain_loop("cnn", "sgd")
    for (trained,) in nccl_ranks.run(train_cases, 2, "cnn", [spec]):
        errors = relative_errors(trained, expected)
        assert max(errors.values()) <= 1e-9, max(errors, key=errors.get)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved_1f1b"])
def test_a_pipeline_equals_one_device(nccl_ranks, kind):
    axes = parallel(pp=2, schedule=kind, virtual_stages=1 if kind == "1f1b" else 2)
    spec = fit_spec("adamw", microbatch_samples=2, parallel=axes, device="cuda")
    by_rank = nccl_ranks.run(train_cases, 2, "sequential", [spec])
    errors = relative_errors(
        join_stages([trained for (trained,) in by_rank]), train_plain_loop("sequential", "adamw")
    )
    assert max(errors.values()) <= 1e-9, max(errors, key=errors.get)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", ["cnn", "sequential"])
def test_bf16_follows_fp64(nccl_ranks, name, zero):
    """8 bits of activations: a rounding is off by 2^-9; a wrong sum over ranks would be off by halves."""
    axes = parallel(dp_shard=2, zero=zero) if zero else parallel(dp_replicate=2)
    spec = fit_spec(
        microbatch_samples=4,
        sync_batch_norm=name == "cnn",
        parallel=axes,
        device="cuda",
        precision={"compute": "bf16"},
    )
    for (trained,) in nccl_ranks.run(train_cases, 2, name, [spec]):
        expected = train_plain_loop(name, "sgd")
        assert trained.losses == pytest.approx(expected.losses, rel=1e-2)
        assert trained.grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
