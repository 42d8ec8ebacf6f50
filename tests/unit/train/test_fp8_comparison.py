"""fp8 compared with bf16: small differences in a healthy model, and large ones where fp8 fails."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from tests.equivalence.test_fp8 import expert_run, fp8_run
from tests.support.equivalence import this_world

from meshwright.mesh import Mesh, build_mesh
from meshwright.parallel.fp8 import in_bf16
from meshwright.parallel.fp8_experts import expert_sites
from meshwright.precision.fp8.delayed import Fp8Scales
from meshwright.precision.fp8.recipes import E5M2, RECIPES
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import Fp8Spec, PrecisionSpec, RunSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.fp8_comparison import Fp8Comparison, Fp8Report
from meshwright.train.step import Training, train_step


def _run(recipe: str, init_std: float = 0.05) -> RunSpec:
    fp8 = Fp8Spec(recipe=recipe, bf16_layers_each_end=0, compare_every_steps=1, min_gradient_cosine=0.95)
    run = fp8_run(precision=PrecisionSpec(compute="bf16", fp8=fp8))
    return run.with_(model=run.model.with_(init_std=init_std))


def _mesh(run: RunSpec) -> Mesh:
    return build_mesh(run.parallel, this_world())


def _compare(run: RunSpec, plant=None) -> Fp8Report:
    mesh = _mesh(run)
    training = build_training(run, mesh)
    if plant is not None:
        plant(training)
    return Fp8Comparison(run, training, mesh).compare(next(build_data(run, mesh)), seed=0)


def _scale_gate_and_up(training: Training) -> None:
    """A SwiGLU outlier as long runs grow them: one inner unit whose gate and up have lined up."""
    for name, shard in training.named_shards.items():
        if name in ("blocks.1.mlp.gate.weight", "blocks.1.mlp.up.weight"):
            shard.data[3] *= 4000.0
        if name == "blocks.1.mlp.down.weight":
            shard.data[:, 3] /= 4000.0**2


def _stale_scales(training: Training) -> None:
    """Scales of another time, in which everything was thousands of times larger."""
    for module in training.program.stages[0].modules():
        if isinstance(module, Fp8Scales):
            module.has_history = True
            for unit in (module.scale_x, module.scale_weight, module.scale_gradient):
                unit.fill_(2.0**10)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_healthy_gradients_agree(ranks: RankPool, recipe: str) -> None:
    report = ranks.run(_compare, 1, _run(recipe))[0]
    assert min(report.cosines.values()) >= 0.99
    assert all(0.98 <= ratio <= 1.02 for ratio in report.norm_ratios.values())
    assert abs(report.loss_fp8 / report.loss_bf16 - 1.0) < 2e-3
    assert report.fallback_layers == []


def test_outlier_in_swiglu_is_detected_with_one_scale_and_harmless_with_blocks(ranks: RankPool) -> None:
    """The MLP is large enough (init_std) that its other units, which one scale rounds to 0, matter."""
    current = ranks.run(_compare, 1, _run("current", init_std=0.15), _scale_gate_and_up)[0]
    assert current.fallback_layers == [0, 1, 2]
    blocks = ranks.run(_compare, 1, _run("mxfp8", init_std=0.15), _scale_gate_and_up)[0]
    assert blocks.fallback_layers == []


def _experts_during_and_after(run: RunSpec) -> tuple[Fp8Report, list[int]]:
    """The report, and the number of fp8 matmuls of experts before, in bf16 and after."""
    mesh = _mesh(run)
    training = build_training(run, mesh)
    stages = training.program.stages
    found = [len(expert_sites(stages))]
    with in_bf16(stages):
        found.append(len(expert_sites(stages)))
    found.append(len(expert_sites(stages)))
    report = Fp8Comparison(run, training, mesh).compare(next(build_data(run, mesh)), seed=0)
    return report, [*found, len(expert_sites(stages))]


def test_experts_are_compared_and_fall_back_with_their_block(ranks: RankPool) -> None:
    """With a threshold that bf16 alone would pass."""
    run = expert_run("current")
    fp8 = run.precision.fp8.with_(compare_every_steps=1, min_gradient_cosine=0.99999)
    precision, model = PrecisionSpec(compute="bf16", fp8=fp8), run.model.with_(init_std=0.05)
    report, found = ranks.run(_experts_during_and_after, 1, run.with_(precision=precision, model=model))[0]
    assert min(report.cosines.values()) >= 0.99
    assert report.fallback_layers == [0, 1] and found == [4, 0, 4, 0]


def _control() -> Fp8Report:
    crude = dataclasses.replace(RECIPES["delayed"], operand=E5M2, gradient=E5M2)
    with patch.dict(RECIPES, {"delayed": crude}):
        return _compare(_run("delayed"), _stale_scales)


def test_negative_control_fails(ranks: RankPool) -> None:
    """Two bits of fraction everywhere and stale scales: a guard that lets this pass has no power."""
    report = ranks.run(_control, 1)[0]
    assert min(report.cosines.values()) < 0.9
    assert report.fallback_layers == [0, 1, 2]


def _weights_after(run: RunSpec, *compared: bool) -> list[dict[str, torch.Tensor]]:
    found = []
    for is_compared in compared:
        mesh = _mesh(run)
        training, batches = build_training(run, mesh), build_data(run, mesh)
        comparison = Fp8Comparison(run, training, mesh)
        for step in range(2):
            batch = next(batches)
            if is_compared:
                assert comparison.compare(batch, seed=step).fallback_layers == []
            seed_step(run.seed, step)
            train_step(training, batch, learning_rate=1e-2)
        found.append({name: shard.detach().clone() for name, shard in training.named_shards.items()})
    return found


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_comparison_does_not_change_training(ranks: RankPool, recipe: str) -> None:
    without, with_comparisons = ranks.run(_weights_after, 1, _run(recipe), False, True)[0]
    for name, weight in without.items():
        assert torch.equal(weight, with_comparisons[name]), name
