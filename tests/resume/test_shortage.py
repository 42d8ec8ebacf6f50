"""A rank runs out of memory: every rank takes the same decision, and what goes on is the same course."""

import datetime
import json
import threading
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.support.attempts import last_checkpoint, read_tensors
from tests.support.harness import RTOL, this_world, worst_errors
from tests.support.tiny_runs import tiny_run
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.errors import EXIT_RUN_FAILED, RunError
from meshwright.mesh import rejoin_world
from meshwright.models.decoder import Block, Decoder
from meshwright.observe.metrics import read_metrics
from meshwright.resilience.shortage import prepare_device_groups
from meshwright.spec import MemorySpec, ObserveSpec, ParallelSpec
from meshwright.train.oom_report import smaller_microbatch
from meshwright.train.session import train_on
from meshwright.train.state import TrainState

BACK_OFF = MemorySpec(on_oom="halve_microbatch")
# gloo has no way to end a collective from outside, so the partners of the short rank wait this long.
WAIT_SECONDS = 5
# On a card nobody waits so long: a hang must be ended by us, not by torch.
CARD_WAIT_SECONDS = 600


class Strike(NamedTuple):
    """Which rank runs out of memory, and when: at which of its micro-batches of two sequences, and where."""

    rank: int
    call: int
    place: Literal["forward", "block", "backward", "update"] = "forward"


class Plan:
    """Memory runs out where the strike says, as long as micro-batches have two sequences."""

    def __init__(self, strike: Strike | None) -> None:
        self._strike, self._count = strike, 0
        self.models = weakref.WeakSet[nn.Module]()
        """All that a step was made with and that are still there."""
        self.threads_before = threading.enumerate()

    def before_forward(self, module, inputs):
        if isinstance(module, Decoder):
            self.models.add(module)
        if torch.is_grad_enabled() and inputs and len(inputs[0]) == 2:
            self._fail_if_due("forward", isinstance(module, Decoder))
            self._fail_if_due("block", isinstance(module, Block))

    def after_forward(self, module, _inputs, output):
        if isinstance(module, Block) and output.requires_grad and len(output) == 2:
            output.register_hook(lambda _: self._fail_if_due("backward", True))

    def before_update(self, *_):
        self._fail_if_due("update", True)

    def _fail_if_due(self, place: str, is_here: bool) -> None:
        if self._strike is None or self._strike.place != place or not is_here:
            return
        self._count += 1
        if dist.get_rank() == self._strike.rank and self._count == self._strike.call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextmanager
def shortage(strike: Strike | None):
    """Let it happen."""
    plan = Plan(strike)
    with ExitStack() as planted:
        for handle in (
            register_module_forward_pre_hook(plan.before_forward),
            register_module_forward_hook(plan.after_forward),
            register_optimizer_step_pre_hook(plan.before_update),
        ):
            planted.callback(handle.remove)
        yield plan


@contextmanager
def group_timeout(seconds: float):
    """Of groups that are made without one of their own."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    usual = {name: getattr(dist.distributed_c10d, name) for name in names}
    for name in names:
        setattr(dist.distributed_c10d, name, datetime.timedelta(seconds=seconds))
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(dist.distributed_c10d, name, value)


class Census(NamedTuple):
    """What there is of all attempts at training, before an update."""

    models: int
    groups: int
    threads: list[str]
    device_bytes: int


def census(plan: Plan) -> Census:
    return Census(
        models=len(plan.models),
        groups=len(dist.distributed_c10d._world.pg_map),
        # What an earlier job of this rank left running is not of these attempts.
        threads=sorted(thread.name for thread in threading.enumerate() if thread not in plan.threads_before),
        device_bytes=torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
    )


class End(NamedTuple):
    """How an attempt to train ended on one rank."""

    state: TrainState | None
    error: RunError | None
    census: Census | None
    """Before the last update."""


def _train(run, run_dir: Path, strike: Strike | None) -> End:
    world = this_world()
    on_card = world.device.type == "cuda"
    wait_seconds = CARD_WAIT_SECONDS if on_card else WAIT_SECONDS
    seen: list[Census] = []
    if on_card:
        prepare_device_groups()
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # a hang tells where, natively too
    with shortage(strike) as plan, group_timeout(wait_seconds):
        counting = register_optimizer_step_pre_hook(lambda *_: seen.append(census(plan)))
        try:
            dist.barrier()  # until all have connected, none may leave
            rejoin_world(world, 100, timeout_seconds=wait_seconds)
            return End(train_on(run, world, run_dir).state, None, seen[-1])
        except RunError as error:
            rejoin_world(world, 101)  # the pool's last barrier needs groups that are whole
            return End(None, error, None)
        finally:
            counting.remove()


def train(ranks, run, run_dir: Path, strike: Strike | None = None) -> list[End]:
    """What every rank came to; without a strike nobody is short."""
    try:
        return ranks.run(_train, run.parallel.num_ranks, run, run_dir, strike)
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
    """Bitwise the run that had them from the start, and nothing is left of the first attempt."""
    run = run_of(layout, memory=BACK_OFF)
    size = run.parallel.num_ranks
    ends = train(ranks, run, tmp_path / "short", Strike(size - 1, 2))
    small = train(ranks, smaller_microbatch(run), tmp_path / "small")
    assert {end.state.step for end in ends} == {run.schedule.num_steps}
    found, expected = final_tensors(tmp_path / "short"), final_tensors(tmp_path / "small")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    events = [json.loads(line) for line in (tmp_path / "short" / "events-0.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["kind"] == "warning"]
    assert told == [f"rank {size - 1} ran out of memory: step 1 again in micro-batches of 1"]
    assert [end.census for end in ends] == [end.census for end in small]
    assert {end.census.models for end in ends} == {1}


@pytest.mark.parametrize("layout", ["zero_3", "pp"])
def test_a_shortage_on_the_way_changes_nothing(ranks, tmp_path, layout):
    """Momentum, averages, position of the data and number of updates come along."""
    run = run_of(layout, memory=BACK_OFF)
    run = run.with_(optim=run.optim.with_(ema_decay=0.5))
    calls_of_a_step = 4 // run.parallel.dp
    train(ranks, run, tmp_path / "short", Strike(0, 3 * calls_of_a_step + 2))
    train(ranks, run.with_(memory=MemorySpec()), tmp_path / "whole")
    assert (
        max(worst_errors(final_tensors(tmp_path / "short"), final_tensors(tmp_path / "whole")).values())
        < RTOL
    )
    rows = read_metrics(tmp_path / "short")
    assert [row["step"] for row in rows] == list(range(1, run.schedule.num_steps + 1))


def test_without_a_back_off_the_run_ends_with_what_to_do(ranks, tmp_path):
    run = run_of("zero_3")
    errors = [end.error for end in train(ranks, run, tmp_path, Strike(1, 3))]
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


def test_a_shortage_in_the_update_ends_the_run_on_every_rank(ranks, tmp_path):
    """The partner finds out where it waits for that rank: in the next step."""
    run = run_of("replicas", memory=BACK_OFF, observe=ObserveSpec(every_steps=100))
    ends = train(ranks, run, tmp_path, Strike(1, 2, "update"))
    assert all("rank 1 ran out of memory in step" in end.error.fact for end in ends)


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
