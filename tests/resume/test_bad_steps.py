"""Gradients that are not finite, and spikes: the batch is skipped, or the run goes back and skips data."""

from pathlib import Path
from unittest.mock import patch

import pytest
from tests.support.run_directories import Attempt, assert_same_state, train_here
from tests.support.runs import tiny_run

from meshwright.errors import RunError
from meshwright.observe.events import events_path, read_events
from meshwright.observe.metrics import read_metrics
from meshwright.spec import CheckpointSpec, ParallelSpec, RunSpec, ScheduleSpec
from meshwright.train import step as step_module

TWO_RANKS = ParallelSpec(dp_shard=2, zero=3)


def run_of(
    action: str, *, num_steps: int = 6, spike_factor: float | None = None, max_in_a_row: int = 5
) -> RunSpec:
    run = tiny_run(parallel=TWO_RANKS, batch_sequences=2, checkpoint=CheckpointSpec(every_steps=2))
    bad_steps = {"action": action, "spike_factor": spike_factor, "max_in_a_row": max_in_a_row}
    schedule = ScheduleSpec(num_steps=num_steps, kind="constant")
    return run.with_(schedule=schedule, resilience=run.resilience.with_(bad_steps=bad_steps))


def train_with_bad_batches(
    run: RunSpec, run_dir: Path, bad: dict[int, float], first: int = 0
) -> Attempt | str:
    """Train while the gradient norm of some batches, counted from `first`, is replaced."""
    clip, calls = step_module.clip_gradients, iter(range(first + 1, 1000))

    def clipped(*arguments, **options):
        norm = clip(*arguments, **options)
        factor = bad.get(next(calls))
        return norm if factor is None else norm * factor

    with patch.object(step_module, "clip_gradients", clipped):
        try:
            return train_here(run, run_dir)
        except RunError as error:
            return str(error)


def _kinds(run_dir: Path) -> list[str]:
    return [event["kind"] for event in read_events(events_path(run_dir, 0))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_without_finite_gradients_is_skipped(ranks, tmp_path, value):
    found = ranks.run(train_with_bad_batches, 2, run_of("skip"), tmp_path, {3: value})[0]
    assert found.kind == "finished" and found.step == 6
    assert len(found.sample_ids) == 7, "one batch more than steps"
    skips = [event for event in read_events(events_path(tmp_path, 0)) if event["kind"] == "skip"]
    assert [(event["step"], event["batch"]) for event in skips] == [(2, 3)]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_rollback_goes_back_to_the_checkpoint_and_takes_new_data(ranks, tmp_path):
    """The batch after step 3 is bad: back to step 2, without the batches of steps 3 and 4."""
    found = ranks.run(train_with_bad_batches, 2, run_of("rollback"), tmp_path, {4: float("nan")})[0]
    assert found.step == 6 and len(found.sample_ids) == 8
    taken = [sample for batch in found.sample_ids for sample in batch]
    assert len(set(taken)) == len(taken), "no sample is used twice"
    (rollback,) = [event for event in read_events(events_path(tmp_path, 0)) if event["kind"] == "rollback"]
    assert (rollback["step"], rollback["from_step"], rollback["batch"]) == (2, 3, 4)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def train_with_spikes_of_the_loss(run: RunSpec, run_dir: Path, bad: dict[int, float]) -> Attempt:
    """Train while the loss of some batches, counted from 1, is multiplied on this rank."""
    limited, calls = step_module.LossLimit.global_loss, iter(range(1, 1000))

    def spiked(limit, part):
        return limited(limit, part * bad.get(next(calls), 1.0))

    with patch.object(step_module.LossLimit, "global_loss", spiked):
        return train_here(run, run_dir)


def test_a_spike_of_the_loss_is_skipped_after_the_first_steps(ranks, tmp_path):
    run = run_of("skip", num_steps=26)
    bad_steps = run.resilience.bad_steps.with_(loss_spike_factor=2.0)
    run = run.with_(resilience=run.resilience.with_(bad_steps=bad_steps))
    spikes = {10: 5.0, 24: 5.0, 26: float("nan")}
    found = ranks.run(train_with_spikes_of_the_loss, 2, run, tmp_path, spikes)[0]
    assert found.step == 26 and len(found.sample_ids) == 28
    skips = [event for event in read_events(events_path(tmp_path, 0)) if event["kind"] == "skip"]
    assert [event["batch"] for event in skips] == [24, 26], "the first steps are not judged"
    usual = read_metrics(tmp_path)[22]["loss"]
    assert skips[0]["loss"] == pytest.approx(5 * usual, rel=0.2)


def test_a_spike_is_skipped_and_a_resumed_run_skips_the_same(ranks, tmp_path):
    run = run_of("skip", num_steps=26, spike_factor=3.0)
    bad = {10: 50.0, 24: 50.0}  # the first steps are not judged
    whole = ranks.run(train_with_bad_batches, 2, run, tmp_path / "whole", bad)[0]
    assert whole.step == 26 and len(whole.sample_ids) == 27
    assert _kinds(tmp_path / "whole").count("skip") == 1
    part = run.with_(schedule=run.schedule.with_(num_steps=22))
    ranks.run(train_with_bad_batches, 2, part, tmp_path / "parts", bad)
    ranks.run(train_with_bad_batches, 2, run, tmp_path / "parts", bad, 22)
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


def test_too_many_bad_steps_in_a_row_end_the_run(ranks, tmp_path):
    run, bad = run_of("rollback", max_in_a_row=3), {batch: float("nan") for batch in range(3, 20)}
    found = ranks.run(train_with_bad_batches, 2, run, tmp_path, bad)[0]
    assert isinstance(found, str) and "3 bad steps in a row at step 2" in found
    assert _kinds(tmp_path)[-1] == "failure"
