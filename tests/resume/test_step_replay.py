"""Forward and backward that run twice: no false alarm on any mesh, and one flipped bit is found and named."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.run_directories import assert_same_state, train_here
from tests.support.runs import tiny_run
from tests.support.soak import soak

from meshwright.errors import RunError
from meshwright.observe.events import events_path, read_events
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.resilience import ReplaySpec
from meshwright.train import loop, probes

MESHES = {
    "dp x ep, ZeRO-2": ("moe", ParallelSpec(dp_shard=2, ep=2, zero=2)),
    "dp x cp, ZeRO-3": ("gqa", ParallelSpec(dp_shard=2, cp=2, zero=3)),
    "tp x pp": ("gqa", ParallelSpec(tp=2, pp=2)),
    "dp x tp x pp": ("gqa", ParallelSpec(dp_replicate=2, tp=2, pp=2)),
}


def replayed(run: RunSpec, action: str = "restart") -> RunSpec:
    """The run with a replay of every second step."""
    replay = ReplaySpec(every_steps=2, on_difference=action)
    return run.with_(deterministic=True, resilience=run.resilience.with_(replay=replay))


@pytest.mark.parametrize("name", [soak(name) if name == "dp x tp x pp" else name for name in MESHES])
def test_a_replay_has_no_false_alarm_and_changes_nothing(ranks, tmp_path, name):
    model, parallel = MESHES[name]
    run = tiny_run(model, parallel=parallel, deterministic=True)
    ranks.run(train_here, parallel.num_ranks, run, tmp_path / "plain")
    found = ranks.run(train_here, parallel.num_ranks, replayed(run), tmp_path / "replayed")
    assert {one.kind for one in found} == {"finished"}
    assert_same_state(tmp_path / "plain", tmp_path / "replayed")


def train_with_a_flip(run: RunSpec, run_dir: Path, rank: int, what: str) -> str:
    """Train; in the second run of step 4 one bit flips on a rank. Returns the error, or the outcome."""
    first_run = probes.first_run

    def flipped(job, batch, state):
        found = first_run(job, batch, state)
        if state.step == 3 and dist.get_rank() == rank:
            _flip_next(job.training.program, what)
        return found

    with patch.object(loop, "first_run", flipped):
        try:
            return train_here(run, run_dir).kind
        except RunError as error:
            return f"{type(error).__name__}: {error}"


def _flip_next(program, what: str) -> None:
    if what == "loss":
        accumulate = program.accumulate
        program.accumulate = lambda *args, **options: _flip(accumulate(*args, **options))
        return
    (parameter,) = [one.parameter for one in program.shards if one.name == what]
    is_over = []

    def flip_once(gradient):
        if not is_over:
            is_over.append(True)
            return _flip(gradient.clone())
        return gradient

    parameter.register_hook(flip_once)


def _flip(tensor):
    tensor.view(torch.int64).view(-1)[0] ^= 1 << 40
    return tensor


@pytest.mark.parametrize("zero", [0, 2])
def test_a_flipped_bit_names_the_rank_and_the_parameter(ranks, tmp_path, zero):
    parallel = ParallelSpec(dp_shard=2, zero=zero) if zero else ParallelSpec(dp_replicate=2)
    run = replayed(tiny_run(parallel=parallel))
    found = ranks.run(train_with_a_flip, 2, run, tmp_path, 1, "blocks.1.mlp_norm.weight")
    start = "LostRank: resilience.replay: forward and backward of step 4 ran twice, and differ: rank 1 on "
    assert all(text.startswith(start) for text in found)
    assert all(": the gradient of blocks.1.mlp_norm.weight" in text for text in found)
    assert all("rank 0" not in text for text in found)


def test_a_flipped_loss_is_found_and_the_run_ends(ranks, tmp_path):
    run = replayed(tiny_run(parallel=ParallelSpec(dp_shard=2, zero=3)), "stop")
    found = ranks.run(train_with_a_flip, 2, run, tmp_path, 1, "loss")
    assert all(text.startswith("RunError: ") and ": its part of the loss" in text for text in found)
    assert all("rank 1 on " in text and "rank 0" not in text for text in found)


def test_a_warning_goes_on_and_is_logged(ranks, tmp_path):
    run = replayed(tiny_run(parallel=ParallelSpec(dp_replicate=2)), "warn")
    found = ranks.run(train_with_a_flip, 2, run, tmp_path, 0, "blocks.0.attention_norm.weight")
    assert set(found) == {"finished"}
    for rank in (0, 1):
        warnings = [one for one in read_events(events_path(tmp_path, rank)) if one["kind"] == "warning"]
        assert any("step 4 ran twice, and differ: rank 0 on " in one["text"] for one in warnings)
