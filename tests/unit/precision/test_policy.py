"""Mixed precision: weights stay fp32, results stay close, and deterministic runs have equal bits."""

import pytest
import torch
from tests.support.equivalence import run_case, this_world
from tests.support.runs import tiny_run

from meshwright.errors import SpecError
from meshwright.mesh import build_mesh
from meshwright.precision.policy import autocast_dtype, prepare_device, weight_dtype
from meshwright.spec import LossScaleSpec, ParallelSpec, PrecisionSpec
from meshwright.train.build import build_training

# One rounding to 8 (bf16) or 11 (fp16) bits is 2^-9 or 2^-12; a handful of layers adds up some of them.
LOSS_TOLERANCE = {"bf16": 2**-6, "fp16": 2**-9}
NORM_TOLERANCE = {"bf16": 2**-4, "fp16": 2**-7}
PRECISIONS = {
    "bf16": PrecisionSpec(compute="bf16"),
    "fp16": PrecisionSpec(compute="fp16", loss_scale=LossScaleSpec(initial=1024.0)),
}


@pytest.mark.parametrize("compute", PRECISIONS)
@pytest.mark.parametrize("stage", (1, 3))
def test_sixteen_bits_stay_near_fp32(ranks, compute, stage):
    run = tiny_run("gqa", parallel=ParallelSpec(dp_shard=2, zero=stage), optim="adamw")
    lower = run_case(ranks, run.with_(precision=PRECISIONS[compute]))[0]
    fp32 = run_case(ranks, run.with_(precision=PrecisionSpec(compute="fp32")))[0]
    assert lower.losses == pytest.approx(fp32.losses, rel=LOSS_TOLERANCE[compute])
    assert lower.grad_norms == pytest.approx(fp32.grad_norms, rel=NORM_TOLERANCE[compute])
    assert lower.losses != fp32.losses  # it did compute in another precision
    assert {weight.dtype for weight in lower.weights.values()} == {torch.float32}
    assert {state.dtype for state in lower.optimizer.values()} == {torch.float32}
    assert {gradient.dtype for gradient in lower.gradients[0].values()} == {torch.float32}


def _updates_of_tiny_steps() -> list[bool]:
    """Whether weights move when the rate is far below a bf16 step of them."""
    run = tiny_run("gqa", precision=PRECISIONS["bf16"])
    training = build_training(run, build_mesh(run.parallel, this_world()))
    before = {name: shard.detach().clone() for name, shard in training.named_shards.items()}
    for shard in training.named_shards.values():
        shard.grad = torch.ones_like(shard) * 1e-4
    training.optimizer.param_groups[0]["lr"] = 1e-2
    training.optimizer.param_groups[1]["lr"] = 1e-2
    training.optimizer.step()
    return [not torch.equal(shard, before[name]) for name, shard in training.named_shards.items()]


def test_updates_too_small_for_bf16_are_not_lost(ranks):
    assert all(ranks.run(_updates_of_tiny_steps, 1)[0])


def test_dtypes():
    fp32 = {
        compute: weight_dtype(PrecisionSpec(compute=compute)) for compute in ("fp64", "fp32", "bf16", "fp16")
    }
    assert fp32 == {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.float32,
        "fp16": torch.float32,
    }
    assert autocast_dtype(PrecisionSpec(compute="fp32")) is None
    assert autocast_dtype(PrecisionSpec(compute="bf16")) is torch.bfloat16


def test_tf32_needs_a_gpu():
    with pytest.raises(SpecError, match="tf32 needs a CUDA device"):
        prepare_device(PrecisionSpec(compute="tf32"), torch.device("cpu"), deterministic=False)


@pytest.mark.parametrize("compute", ("fp32", "bf16"))
def test_the_same_run_twice_gives_equal_bits(ranks, compute):
    run = tiny_run(
        "moe",
        parallel=ParallelSpec(dp_shard=2, zero=1),
        optim="adamw",
        deterministic=True,
        precision=PrecisionSpec(compute=compute),
    )
    run = run.with_(model=run.model.with_(dropout=0.3))
    first, second = (run_case(ranks, run)[0] for _ in range(2))
    assert (first.losses, first.grad_norms, first.digests) == (
        second.losses,
        second.grad_norms,
        second.digests,
    )
