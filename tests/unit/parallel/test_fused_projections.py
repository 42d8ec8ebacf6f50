"""Fused projections and weight-gradient accumulation fusion, uncompiled, against separate projections."""

from collections.abc import Iterator

import pytest
import torch
from tests.support.runs import tiny_run
from torch import Tensor

from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models.decoder import build_decoder
from meshwright.models.layers.fused import fused_projection_of, linears_sharing_input
from meshwright.ops.fused_linear import is_packed
from meshwright.parallel.fused_projections import fuse_projections
from meshwright.parallel.simulation import Simulation
from meshwright.spec import ParallelSpec, PrecisionSpec, RunSpec
from meshwright.train.build import build_data, build_training
from meshwright.train.step import Training, train_step

# The transforms of compiled blocks, without the compiler.
UNCOMPILED = Simulation(compile_blocks=lambda *_: None)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """One rank."""
    yield build_mesh(ParallelSpec(), join_world("cpu"))
    leave_world()


def _steps(run: RunSpec, mesh: Mesh) -> tuple[Training, list[Tensor], dict[str, Tensor]]:
    training, batches = build_training(run, mesh, simulation=UNCOMPILED), build_data(run, mesh)
    losses = [train_step(training, next(batches), learning_rate=0.05).loss for _ in range(3)]
    batches.close()
    return training, losses, {one.name: one.shard.detach().clone() for one in training.program.shards}


@pytest.mark.parametrize("model", ["gqa", "tied", "gpt", "mla", "moe_shared"])
def test_three_steps_of_several_micro_batches_equal_those_of_separate_projections(
    model: str, mesh: Mesh
) -> None:
    _, losses, weights = _steps(tiny_run(model), mesh)
    training, fused_losses, fused_weights = _steps(tiny_run(model, compile=True), mesh)
    makers = map(fused_projection_of, training.program.stages[0].modules())
    assert any(makers) == (model != "gpt")
    torch.testing.assert_close(fused_losses, losses, rtol=1e-12, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(fused_weights[name], weight, rtol=1e-9, atol=1e-12)


def test_bf16_weights_of_a_fused_projection_are_packed_and_train_as_separate_ones(mesh: Mesh) -> None:
    precision = PrecisionSpec(compute="bf16", weights="bf16_exact", gradients="bf16")
    _, losses, _ = _steps(tiny_run("gqa", precision=precision), mesh)
    training, fused_losses, _ = _steps(tiny_run("gqa", precision=precision, compile=True), mesh)
    fused = [one for one in training.program.stages[0].modules() if fused_projection_of(one)]
    assert len(fused) == 4 and all(
        is_packed([linear.weight for linear in linears_sharing_input(one)]) for one in fused
    )
    assert {linear.grad_buffers for one in fused for linear in linears_sharing_input(one)} == {()}
    # Matmuls and sums of bf16 numbers in another order: a few roundings of 2^-9 in the last of three losses.
    torch.testing.assert_close(fused_losses, losses, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": False},
        {"parallel": ParallelSpec(dp_shard=2, zero=3)},
        {"parallel": ParallelSpec(tp=2)},
    ],
)
def test_sharded_or_uncompiled_weights_are_not_fused(changes: dict[str, object]) -> None:
    run = tiny_run("gqa", **{"compile": True, **changes})
    model = build_decoder(run.model)
    fuse_projections(model, run)
    assert not any(map(fused_projection_of, model.modules()))
