"""Random masks: other ones on other ranks and steps, the same ones again in recompute."""

import pytest
import torch
from tests.support.equivalence import run_case, this_world
from tests.support.runs import MODELS, tiny_run
from torch import nn

from meshwright.mesh import build_mesh
from meshwright.spec import MemorySpec, ParallelSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.step import train_step

WITH_DROPOUT = MODELS["tied"].with_(dropout=0.5)


def _masks(parallel: ParallelSpec) -> list[list[torch.Tensor]]:
    """Which entries each dropout of two steps kept on this rank."""
    run = tiny_run(WITH_DROPOUT, parallel=parallel)
    mesh = build_mesh(parallel, this_world())
    training, batches = build_training(run, mesh), build_data(run, mesh)
    steps: list[list[torch.Tensor]] = []

    def watch(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        steps[-1].append((output != 0).detach())

    for stage in training.program.stages:
        for module in stage.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(watch)
    for index in range(2):
        steps.append([])
        seed_step(run.seed, index)
        train_step(training, next(batches), learning_rate=0.0)
    batches.close()
    return steps


@pytest.mark.parametrize(
    "parallel",
    [ParallelSpec(dp_replicate=2), ParallelSpec(dp_shard=2, zero=3), ParallelSpec(tp=2), ParallelSpec(cp=2)],
    ids=["dp", "zero_3", "tp", "cp"],
)
def test_no_two_ranks_share_a_mask(ranks, parallel):
    """Between the blocks each tp rank has another part of the sequence, so tp counts as well."""
    first, second = ranks.run(_masks, 2, parallel)
    for step in range(2):
        assert len(first[step]) == len(second[step]) > 0
        for mine, theirs in zip(first[step], second[step], strict=True):
            assert mine.shape == theirs.shape
            # Independent halves agree in half of the places; 128 and more entries are never all alike.
            assert 0.3 < (mine == theirs).double().mean() < 0.7
    assert not torch.equal(first[0][0], first[1][0])


def test_dropout_keeps_the_share_that_was_set(ranks):
    kept = torch.cat([mask.flatten() for step in ranks.run(_masks, 1, ParallelSpec())[0] for mask in step])
    assert 0.48 < kept.double().mean() < 0.52  # thousands of fair coins


@pytest.mark.parametrize("recompute", ("full", "selective"))
@pytest.mark.parametrize(
    "parallel", [ParallelSpec(), ParallelSpec(dp_shard=2, zero=3)], ids=["one", "zero_3"]
)
def test_recompute_draws_the_same_masks(ranks, recompute, parallel):
    """Nothing is summed in another order, so every bit is the same."""
    run = tiny_run(WITH_DROPOUT, parallel=parallel, optim="adamw")
    plain = run_case(ranks, run)[0]
    again = run_case(ranks, run.with_(memory=MemorySpec(recompute=recompute)))[0]
    assert plain.losses == again.losses
    for expected, found in zip(plain.gradients, again.gradients, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert plain.digests == again.digests
