"""A checkpoint of a random layout loads on another random layout: every bit, and the same losses from there.

Another seed: MESHWRIGHT_TEST_SEED=2 make soak.
"""

import os
import random

import pytest
import torch
from tests.resume.test_formats import restored
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, OPTIMIZERS, tiny_run

from meshwright.observe.metrics import read_metrics
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.check import check

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
MODEL = MODELS["moe"].with_(num_layers=4, tied_head=True)
# Sums of a step are reordered between layouts; everything is in float64.
LOSS_RTOL = 1e-9


def run_on(parallel: ParallelSpec) -> RunSpec:
    return tiny_run(
        MODEL, parallel=parallel, optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5), batch_sequences=12
    )


def random_layout(rng: random.Random, max_ranks: int) -> ParallelSpec:
    """A layout that every rule of a run allows."""
    while True:
        axes = {name: rng.choice((1, 1, 2, 3)) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
        shards = axes["dp_shard"] * axes["cp"]
        zero = rng.randint(1, 3) if shards > 1 else 0
        ep = rng.choice((1, axes["dp_shard"]))
        schedule = {"schedule": rng.choice(("1f1b", "gpipe"))} if axes["pp"] > 1 else {}
        parallel = ParallelSpec.model_validate({**axes, **schedule, "zero": zero, "ep": ep})
        if parallel.num_ranks <= max_ranks and not check(run_on(parallel)):
            return parallel


def check_pair(ranks, folder, trial: int, max_ranks: int) -> None:
    rng = random.Random(1000 * SEED + trial)
    before, after = random_layout(rng, max_ranks), random_layout(rng, max_ranks)
    print(f"trial {trial}: {before} -> {after}")
    attempt(ranks, run_on(before), folder / "whole")
    attempt(ranks, run_on(before), folder / "parts", stop_after=3)
    saved = read_tensors(last_checkpoint(folder / "parts"))
    for held in ranks.run(restored, after.num_ranks, run_on(after), folder / "parts")[:1]:
        assert set(held) <= set(saved)
        assert all(torch.equal(value, saved[name]) for name, value in held.items())
    attempt(ranks, run_on(after), folder / "parts")
    rows, expected = read_metrics(folder / "parts"), read_metrics(folder / "whole")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, want in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=LOSS_RTOL)


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(2))
def test_a_random_pair_of_layouts(ranks, tmp_path, trial):
    check_pair(ranks, tmp_path, trial, max_ranks=4)


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(100, 160))
def test_many_random_pairs_of_layouts(ranks, tmp_path, trial):
    check_pair(ranks, tmp_path, trial, max_ranks=8)
