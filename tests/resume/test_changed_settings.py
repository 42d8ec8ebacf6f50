"""A run that goes on with other settings keeps its state: weights, moments, position in the samples."""

from pathlib import Path

import pytest
import torch
from tests.support.run_directories import Attempt, attempt, last_checkpoint, read_tensors
from tests.support.runs import OPTIMIZERS, ragged_dataset, tiny_run

from meshwright.errors import DataError
from meshwright.observe.events import read_events
from meshwright.observe.metrics import read_metrics
from meshwright.optim.schedule import learning_rate
from meshwright.rehearse.rank_pool import RankFailure
from meshwright.spec import ParallelSpec, RunSpec, ScheduleSpec
from meshwright.spec.changes import Change
from meshwright.train import messages

ADAM = OPTIMIZERS["adamw"].with_(ema_decay=0.5)
CONSTANT = ScheduleSpec(num_steps=6, kind="constant")


def samples(*parts: Attempt) -> list[int]:
    return [sample for part in parts for batch in part.sample_ids for sample in batch]


def changes(run_dir: Path, rank: int = 0) -> list[tuple[int, str]]:
    events = read_events(run_dir / f"events-{rank}.jsonl")
    return [(event["step"], event["setting"]) for event in events if event["kind"] == "change"]


@pytest.mark.parametrize(
    "parallel", [ParallelSpec(), ParallelSpec(dp_shard=2, zero=3)], ids=["one", "zero_3"]
)
def test_the_optimizer_state_is_kept(ranks, tmp_path, parallel):
    """A schedule of another kind with the same learning rates: the run is that of one, bit for bit."""
    run = tiny_run("gqa", optim=ADAM, schedule=CONSTANT, parallel=parallel)
    attempt(ranks, run, tmp_path / "whole")
    attempt(ranks, run, tmp_path / "parts", stop_after=3)
    same_rates = CONSTANT.with_(kind="linear", min_lr_ratio=1.0)
    attempt(ranks, run.with_(schedule=same_rates), tmp_path / "parts")
    whole, parts = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any(name.startswith("optim.") for name in whole)
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    for rank in range(parallel.num_ranks):
        assert changes(tmp_path / "parts", rank) == [(3, "schedule.kind"), (3, "schedule.min_lr_ratio")]


def test_the_learning_rate_follows_the_new_schedule_from_the_resumed_step(ranks, tmp_path):
    run = tiny_run("gqa", optim=ADAM, schedule=ScheduleSpec(num_steps=4, kind="cosine"))
    attempt(ranks, run, tmp_path)
    longer = run.with_(schedule=ScheduleSpec(num_steps=8, kind="cosine"), optim=ADAM.with_(lr=0.02))
    second = attempt(ranks, longer, tmp_path)
    assert (second.kind, second.step) == ("finished", 8)
    expected = [rate(run if step < 4 else longer, step) for step in range(8)]
    assert [row["lr"] for row in read_metrics(tmp_path)] == expected


def rate(run: RunSpec, step: int) -> float:
    return learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)


@pytest.mark.parametrize("ramp", [(), ((2, 2),)], ids=["", "ramp"])
def test_another_batch_keeps_the_position_in_samples(ranks, tmp_path, ramp):
    run = tiny_run("gqa", batch_sequences=4, schedule=CONSTANT, ramp=ramp)
    first = attempt(ranks, run, tmp_path / "parts", stop_after=3)
    second = attempt(ranks, run.with_(data=run.data.with_(batch_sequences=2)), tmp_path / "parts")
    assert [len(batch) for batch in second.sample_ids] == [2, 2, 2]
    whole = attempt(ranks, run, tmp_path / "whole")
    assert samples(first, second) == samples(whole)[: len(samples(first, second))]
    assert changes(tmp_path / "parts") == [(3, "data.batch_sequences")]


def test_another_dataset_starts_at_its_beginning(ranks, tmp_path):
    run = tiny_run("gqa", schedule=CONSTANT)
    attempt(ranks, run, tmp_path / "parts", stop_after=2)
    other = run.with_(data=run.data.with_(path=ragged_dataset(25)))
    second = attempt(ranks, other, tmp_path / "parts")
    fresh = attempt(ranks, other, tmp_path / "fresh")
    assert second.sample_ids == fresh.sample_ids[:4]
    assert changes(tmp_path / "parts") == [(2, "data.path"), (2, "data position")]
    lines = messages.changed([Change("data.path", "a", "b")], learning_rate=0.05, restarts_data=True)
    assert (
        lines[0] == "changed: data.path was 'a', is 'b'" and "the data starts at its beginning" in lines[-1]
    )


def test_a_dataset_that_has_moved_keeps_the_position(ranks, tmp_path):
    run = tiny_run("gqa", schedule=CONSTANT)
    first = attempt(ranks, run, tmp_path / "parts", stop_after=2)
    moved = tmp_path / "moved"
    moved.symlink_to(run.data.path or "")
    second = attempt(ranks, run.with_(data=run.data.with_(path=str(moved))), tmp_path / "parts")
    assert samples(first, second) == samples(attempt(ranks, run, tmp_path / "whole"))
    assert changes(tmp_path / "parts") == [(2, "data.path")]


def test_other_data_under_the_same_settings_is_refused(ranks, tmp_path):
    moved = tmp_path / "data"
    moved.symlink_to(ragged_dataset(30))
    run = tiny_run("gqa", schedule=CONSTANT)
    run = run.with_(data=run.data.with_(path=str(moved)))
    attempt(ranks, run, tmp_path / "run", stop_after=2)
    moved.unlink()
    moved.symlink_to(ragged_dataset(25))
    with pytest.raises((RankFailure, DataError), match="from another dataset"):
        attempt(ranks, run, tmp_path / "run")


def test_an_average_that_begins_later_starts_at_the_saved_weights(ranks, tmp_path):
    run = tiny_run("gqa", optim=OPTIMIZERS["adamw"], schedule=CONSTANT)
    attempt(ranks, run, tmp_path, stop_after=2)
    before = read_tensors(last_checkpoint(tmp_path))
    # A decay of one never changes the average.
    attempt(ranks, run.with_(optim=run.optim.with_(ema_decay=1.0)), tmp_path)
    after = read_tensors(last_checkpoint(tmp_path))
    averages = {name: tensor for name, tensor in after.items() if name.startswith("ema.")}
    assert averages
    for name, average in averages.items():
        assert torch.equal(average, before[name.replace("ema.", "model.", 1)]), name


def test_used_up_data_is_a_finished_run(ranks, tmp_path):
    run = tiny_run("gqa", schedule=CONSTANT, max_epochs=1)
    first = attempt(ranks, run, tmp_path)
    assert (first.kind, first.step) == ("finished", 4)
    events = (tmp_path / "events-0.jsonl").read_bytes()
    assert attempt(ranks, run, tmp_path).sample_ids == []
    assert (tmp_path / "events-0.jsonl").read_bytes() == events
    more = attempt(ranks, run.with_(data=run.data.with_(max_epochs=2)), tmp_path)
    assert more.step == 6
