"""Dynamic loss scaling: the scale itself, and skips that all ranks make together."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.equivalence import this_world
from tests.support.runs import tiny_run

from meshwright.mesh import build_mesh
from meshwright.precision.loss_scale import LossScale
from meshwright.spec import LossScaleSpec, ParallelSpec, PrecisionSpec
from meshwright.train import step
from meshwright.train.build import build_data, build_training


def test_backs_off_and_grows():
    scale = LossScale.start(LossScaleSpec(initial=8.0, growth_steps=2))
    assert not scale.update(math.inf)
    assert not scale.update(math.nan)
    assert scale.scale == 2.0
    assert scale.update(1.0)
    assert scale.scale == 2.0
    assert scale.update(1.0)
    assert scale.scale == 4.0


def test_an_overflow_starts_the_count_again():
    scale = LossScale.start(LossScaleSpec(initial=8.0, growth_steps=2))
    verdicts = [scale.update(norm) for norm in (1.0, math.inf, 1.0)]
    assert verdicts == [True, False, True]
    assert (scale.scale, scale.num_clean_steps) == (4.0, 1)


def test_hysteresis_keeps_the_scale_at_first_overflows():
    scale = LossScale.start(LossScaleSpec(initial=8.0, growth_steps=2, hysteresis=2))
    scale.update(math.inf)
    assert scale.scale == 8.0
    scale.update(math.inf)
    assert scale.scale == 4.0
    scale.update(math.inf)  # used up until the scale grows
    assert scale.scale == 2.0
    scale.update(1.0)
    scale.update(1.0)
    assert (scale.scale, scale.num_overflows) == (4.0, 0)
    scale.update(math.inf)
    assert scale.scale == 4.0


def test_the_scale_stops_at_its_minimum():
    scale = LossScale.start(LossScaleSpec(initial=4.0, minimum=1.5))
    for _ in range(5):
        assert not scale.update(math.inf)
    assert scale.scale == 1.5


def test_the_state_continues_and_older_checkpoints_count_no_overflows():
    spec = LossScaleSpec(initial=8.0, hysteresis=3)
    scale = LossScale.start(spec)
    scale.update(math.inf)
    again = LossScale.start(spec)
    again.load_state(scale.state())
    assert again == scale
    again.load_state({"scale": 2.0, "num_clean_steps": 5})
    assert (again.scale, again.num_clean_steps, again.num_overflows) == (2.0, 5, 0)


def _overflow_on_rank_1(parallel: ParallelSpec) -> dict[str, object]:
    """One step whose gradient is infinite on rank 1 alone, then a sound one."""
    precision = PrecisionSpec(compute="fp16", loss_scale=LossScaleSpec(initial=4.0))
    optim = tiny_run().optim.with_(kind="adamw", ema_decay=0.5)
    run = tiny_run("gqa", parallel=parallel, precision=precision, optim=optim)
    mesh = build_mesh(parallel, this_world())
    training, batches = build_training(run, mesh), build_data(run, mesh)
    before = {name: shard.detach().clone() for name, shard in training.named_shards.items()}
    clip = step.clip_gradients

    def with_inf(shards, *args, **kwargs):
        if dist.get_rank() == 1:
            shards[0][0].grad.view(-1)[0] = torch.inf
        return clip(shards, *args, **kwargs)

    with patch.object(step, "clip_gradients", with_inf):
        skipped = step.train_step(training, next(batches), learning_rate=0.1)
    moved = [name for name, shard in training.named_shards.items() if not torch.equal(shard, before[name])]
    averages_moved = [
        n for n, average in training.ema.averages.items() if not torch.equal(average, before[n])
    ]
    num_updates = {float(state["step"]) for state in training.optimizer.state.values()}
    sound = step.train_step(training, next(batches), learning_rate=0.1)
    batches.close()
    return {
        "skipped": (skipped.is_skipped, sound.is_skipped),
        "norm": float(skipped.grad_norm),
        "moved": (moved, averages_moved),
        "num_updates": num_updates,
        "scale": training.loss_scale.scale,
    }


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, stage):
    parallel = ParallelSpec(dp_shard=2, zero=stage) if stage else ParallelSpec(dp_replicate=2)
    for result in ranks.run(_overflow_on_rank_1, 2, parallel):
        assert result["skipped"] == (True, False)
        assert math.isinf(result["norm"])
        assert result["moved"] == ([], [])
        assert result["num_updates"] == {0.0}
        assert result["scale"] == 2.0
