"""A rank runs out of memory: every rank takes the same decision, and what goes on is the same course."""

import datetime
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.attempts import last_checkpoint, read_tensors
from tests.harness import RTOL, this_world, worst_errors
from tests.tiny_runs import tiny_run
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.errors import EXIT_RUN_FAILED, RunError
from meshwright.mesh import rejoin_world
from meshwright.models.decoder import Decoder
from meshwright.observe.metrics import read_metrics
from meshwright.spec import MemorySpec, ParallelSpec
from meshwright.train.out_of_memory import smaller_microbatch
from meshwright.train.session import train_on

BACK_OFF = MemorySpec(on_oom="halve_microbatch")
# gloo has no way to end a collective from outside, so the partners of the short rank wait this long.
WAIT_SECONDS = 5


@contextmanager
def shortage(rank: int, call: int):
    """The given forward pass of a rank is out of memory, as long as its micro-batches have two sequences."""
    calls = 0

    def before_forward(module, inputs):
        nonlocal calls
        if isinstance(module, Decoder) and torch.is_grad_enabled() and len(inputs[0]) == 2:
            calls += 1
            if dist.get_rank() == rank and calls == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    usual = dist.distributed_c10d.default_pg_timeout
    dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=WAIT_SECONDS)
    try:
        yield
    finally:
        dist.distributed_c10d.default_pg_timeout = usual
        handle.remove()


def _train(run, run_dir: Path, rank: int, call: int):
    with shortage(rank, call):
        dist.barrier()  # until all have connected, none may leave
        world = rejoin_world(this_world(), 100, timeout_seconds=WAIT_SECONDS)
        try:
            return train_on(run, world, run_dir).state
        except RunError as error:
            rejoin_world(world, 101)  # the pool's last barrier needs groups that are whole
            return error


def train(ranks, run, run_dir: Path, rank: int = -1, call: int = 0):
    """What every rank came to; without a rank nobody is short."""
    try:
        return ranks.run(_train, run.parallel.num_ranks, run, run_dir, rank, call)
    finally:
        ranks.restart()  # gloo keeps the connections of collectives that were left half-way


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_tensors(last_checkpoint(run_dir))


LAYOUTS = {
    "one": ParallelSpec(),
    "replicas": ParallelSpec(dp_replicate=2),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
    "tp": ParallelSpec(tp=2),
    "pp": ParallelSpec(pp=2),
}


def run_of(layout: str, optim: str = "adamw", **changes):
    return tiny_run(
        "tied", parallel=LAYOUTS[layout], optim=optim, microbatch_sequences=2, batch_sequences=8, **changes
    )


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.soak if name in ("replicas", "tp") else ()) for name in LAYOUTS],
)
def test_smaller_microbatches_from_the_first_step_on(ranks, tmp_path, layout):
    """Bitwise the run that had them from the start."""
    run = run_of(layout, memory=BACK_OFF)
    size = run.parallel.num_ranks
    states = train(ranks, run, tmp_path / "short", size - 1, 2)
    smaller = smaller_microbatch(run)
    train(ranks, smaller, tmp_path / "small")
    assert {state.step for state in states} == {run.schedule.num_steps}
    found, expected = final_tensors(tmp_path / "short"), final_tensors(tmp_path / "small")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    events = [json.loads(line) for line in (tmp_path / "short" / "events-0.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["kind"] == "warning"]
    assert told == [f"rank {size - 1} ran out of memory: step 1 again in micro-batches of 1"]


@pytest.mark.parametrize("layout", ["zero_3", "pp"])
def test_a_shortage_on_the_way_changes_nothing(ranks, tmp_path, layout):
    """Momentum, averages, position of the data and number of updates come along."""
    run = run_of(layout, memory=BACK_OFF)
    run = run.with_(optim=run.optim.with_(ema_decay=0.5))
    calls_of_a_step = 4 // run.parallel.dp
    train(ranks, run, tmp_path / "short", 0, 3 * calls_of_a_step + 2)
    train(ranks, run.with_(memory=MemorySpec()), tmp_path / "whole")
    assert (
        max(worst_errors(final_tensors(tmp_path / "short"), final_tensors(tmp_path / "whole")).values())
        < RTOL
    )
    rows = read_metrics(tmp_path / "short")
    assert [row["step"] for row in rows] == list(range(1, run.schedule.num_steps + 1))


def test_without_a_back_off_the_run_ends_with_what_to_do(ranks, tmp_path):
    run = run_of("zero_3")
    errors = train(ranks, run, tmp_path, 1, 3)
    assert all(isinstance(error, RunError) for error in errors)
    assert {error.exit_code for error in errors} == {EXIT_RUN_FAILED}
    fact = errors[0].fact
    assert fact.startswith(
        "rank 1 ran out of memory in step 2: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert fact.splitlines()[1].split() == ["predicted", "measured"]
    assert fact.splitlines()[2].split()[:2] == ["weights", "unknown"]
    assert "memory.on_oom=halve_microbatch" in errors[0].hint
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["final_step"]) == ("failed", 1)


def test_when_nothing_is_left_to_halve_the_run_ends(ranks, tmp_path):
    (error,) = ranks.run(_always_short, 1, run_of("one", memory=BACK_OFF), tmp_path)
    assert isinstance(error, RunError) and "ran out of memory in step 1" in error.fact


def _always_short(run, run_dir: Path):
    def before_forward(module, inputs):
        if isinstance(module, Decoder):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    try:
        return train_on(run, this_world(), run_dir).state
    except RunError as error:
        return error
    finally:
        handle.remove()


def test_an_update_that_runs_short_is_not_repeated(ranks, tmp_path):
    """Part of the weights may have moved: there is nothing to go on from."""
    (error,) = ranks.run(_short_update, 1, run_of("one", memory=BACK_OFF), tmp_path)
    assert isinstance(error, RunError) and "ran out of memory in step 1" in error.fact


def _short_update(run, run_dir: Path):
    def before_update(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = register_optimizer_step_pre_hook(before_update)
    try:
        return train_on(run, this_world(), run_dir).state
    except RunError as error:
        return error
    finally:
        handle.remove()


@pytest.mark.parametrize(("size", "smaller"), [(8, 4), (6, 3), (3, 1), (5, 1)])
def test_halves_or_the_next_smaller_part(size, smaller):
    run = tiny_run("gqa", microbatch_sequences=size, batch_sequences=2 * size, memory=BACK_OFF)
    changed = smaller_microbatch(run)
    assert changed is not None
    assert changed.data.microbatch_sequences == smaller
    assert changed.data.batch_sequences == run.data.batch_sequences
    assert changed.memory.on_oom == ("halve_microbatch" if smaller > 1 else "stop")


def test_one_sequence_cannot_be_halved():
    assert smaller_microbatch(tiny_run("gqa")) is None
