"""A checkpoint has the exact weights, whatever format a run keeps them in."""

import pytest
import torch
from tests.support.equivalence import this_world
from tests.support.run_directories import assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, OPTIMIZERS, tiny_run
from torch import Tensor

from meshwright.checkpoint.run_checkpoints import Checkpoints, all_tensors
from meshwright.mesh import build_mesh
from meshwright.spec import ParallelSpec, PrecisionSpec, RunSpec
from meshwright.train.build import build_data, build_training

FP32 = PrecisionSpec(compute="bf16")
EXACT = PrecisionSpec(compute="bf16", weights="bf16_exact")
STOCHASTIC = PrecisionSpec(compute="bf16", weights="bf16_stochastic", gradients="bf16")
LAYOUTS = {
    "one_rank": ParallelSpec(),
    "zero_1": ParallelSpec(dp_shard=2, zero=1),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
}


def run_of(precision: PrecisionSpec, parallel: ParallelSpec | None = None) -> RunSpec:
    state = "bf16" if precision.weights == "bf16_stochastic" else "fp32"
    optim = OPTIMIZERS["adamw"].with_(ema_decay=0.5, state=state)
    return tiny_run(MODELS["tied"], parallel=parallel, optim=optim, precision=precision, deterministic=True)


@pytest.mark.parametrize("precision", (EXACT, STOCHASTIC), ids=("exact", "stochastic"))
@pytest.mark.parametrize(
    "layout",
    ("zero_1", *(pytest.param(name, marks=pytest.mark.soak) for name in ("one_rank", "zero_3"))),
)
def test_stopped_and_resumed_equals_uninterrupted(ranks, tmp_path, layout, precision):
    run = run_of(precision, LAYOUTS[layout])
    attempt(ranks, run, tmp_path / "whole")
    attempt(ranks, run, tmp_path / "parts", stop_after=2)
    attempt(ranks, run, tmp_path / "parts")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


def restored(run: RunSpec, run_dir) -> dict[str, Tensor]:
    """What a run has in its hands right after it resumed."""
    mesh = build_mesh(run.parallel, this_world())
    training = build_training(run, mesh)
    batches = build_data(run, mesh)
    Checkpoints(run, run_dir / "checkpoints", training, batches).restore()
    batches.close()
    return {name: tensor.full_tensor() for name, tensor in all_tensors(run, training).items()}


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [(EXACT, FP32, "zero_1"), (FP32, EXACT, "zero_3")],
    ids=("exact to fp32", "fp32 to exact"),
)
def test_formats_resume_each_other_exactly(ranks, tmp_path, before, after, layout):
    """From one rank to another mesh as well: every bit of every fp32 weight, moment and average."""
    attempt(ranks, run_of(before), tmp_path, stop_after=2)
    saved = read_tensors(last_checkpoint(tmp_path))
    weight = saved["model.blocks.0.mlp.up.weight"]
    assert weight.dtype == torch.float32 and not torch.equal(weight.bfloat16().float(), weight)
    for held in ranks.run(restored, 2, run_of(after, LAYOUTS[layout]), tmp_path):
        assert set(held) == set(saved)
        assert all(torch.equal(held[name], value) for name, value in saved.items())
    attempt(ranks, run_of(after, LAYOUTS[layout]), tmp_path)  # and it resumes


def test_low_precision_formats_resume_as_fp32(ranks, tmp_path):
    """bf16 weights and moments are fp32 numbers too."""
    attempt(ranks, run_of(STOCHASTIC), tmp_path, stop_after=2)
    saved = read_tensors(last_checkpoint(tmp_path))
    assert saved["model.blocks.0.mlp.up.weight"].dtype == torch.bfloat16
    (held,) = ranks.run(restored, 1, run_of(EXACT), tmp_path)
    for name, value in saved.items():
        assert held[name].dtype == torch.float32
        assert torch.equal(held[name], value.float())
