"""Trains a tiny run on the pool of ranks and compares it with the oracle, tensor by tensor."""

import dataclasses
import gc
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from tests.support.expected_traffic import (
    expected_parameter_bytes,
    expected_traffic,
    gradient_bytes,
    most_optimizer_bytes,
)
from tests.support.oracle import Reference, reference
from tests.support.recorded_traffic import Named, Recorder, named_calls
from tests.support.runs import OPTIMIZERS
from torch import Tensor

from meshwright.data.batches import Batch
from meshwright.mesh import Mesh, build_mesh
from meshwright.parallel.pp import stages
from meshwright.rehearse import steps
from meshwright.rehearse.differences import RTOL, disagreements, training_errors, worst_errors
from meshwright.rehearse.rank_pool import RankPool, this_world
from meshwright.rehearse.steps import Trained, gather_full
from meshwright.spec import RunSpec
from meshwright.spec.check import require_valid
from meshwright.train.state_bytes import StateBytes, count_state_bytes, storage_bytes
from meshwright.train.step import StepOutcome, Training, train_step

__all__ = ["RTOL", "gather_full", "this_world", "training_errors", "worst_errors"]


@dataclasses.dataclass
class Result(Trained):
    """What one rank trained, sent and held."""

    communication: Named | None
    """The collectives of the last step, where they were recorded."""
    held: StateBytes
    """Bytes just before the last update."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks do with each run besides training it."""

    num_steps: int = 3
    frozen: tuple[str, ...] = ()
    """Parameters whose name contains one of these parts are frozen."""
    records_traffic: bool = False
    """Whether the last step of the last run records its collectives, which doubles the step's time."""


def run_case(ranks: RankPool, run: RunSpec, **job: Any) -> list[Result]:
    """Train on as many ranks as the run asks for; one Result per rank. `job` are fields of Job."""
    return run_cases(ranks, [run], **job)[0]


def run_cases(ranks: RankPool, runs: list[RunSpec], **job: Any) -> list[list[Result]]:
    """Several runs with one mesh: one list of Results (by rank) per run. `job` are fields of Job."""
    for run in runs:
        require_valid(run)
    by_rank = ranks.run(_train_here, runs[0].parallel.num_ranks, runs, Job(**job))
    return [[results[index] for results in by_rank] for index in range(len(runs))]


def _train_here(runs: list[RunSpec], job: Job) -> list[Result]:
    mesh = build_mesh(runs[0].parallel, this_world())
    recorded = runs[-1] if job.records_traffic else None
    with ExitStack() as stack:
        if job.frozen:
            stack.enter_context(_freezing(job.frozen))
        return [train_steps(run, mesh, job.num_steps, records_traffic=run is recorded) for run in runs]


def _freezing(frozen: tuple[str, ...]) -> Any:
    """Freeze parameters whose name contains one of these parts, as soon as the model is built."""
    build = stages.build_decoder

    def build_frozen(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    return patch.object(stages, "build_decoder", build_frozen)


def train_steps(run: RunSpec, mesh: Mesh, num_steps: int, *, records_traffic: bool = False) -> Result:
    """Build, train and gather. All ranks of the mesh call it."""
    held: list[StateBytes] = []
    recorder = Recorder()

    def watched_step(training: Training, batch: Batch, *, learning_rate: float) -> StepOutcome:
        def before_update(*_: object) -> None:
            held.append(count_state_bytes(training))

        handle = training.optimizer.register_step_pre_hook(before_update)
        is_recorded = records_traffic and len(held) == num_steps - 1
        with recorder if is_recorded else nullcontext():
            outcome = train_step(training, batch, learning_rate=learning_rate)
        handle.remove()
        return outcome

    trained = steps.train_steps(run, mesh, num_steps, step=watched_step)
    fields = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained)}
    calls = named_calls(recorder.calls, mesh) if records_traffic else None
    return Result(**fields, communication=calls, held=held[-1])


def all_tensor_bytes() -> int:
    """Bytes of every tensor storage that Python can reach in this process."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)]
    return storage_bytes([tensor for tensor in tensors if tensor.layout == torch.strided])


def assert_same_training(results: list[Result], expected: Reference, *, rtol: float = RTOL) -> float:
    """Losses, norms, gradients, weights and states equal the oracle's; returns the worst relative error."""
    assert_ranks_agree(results)
    errors = training_errors(results, expected)
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    shown = sorted(wrong.items(), key=lambda item: -item[1])[:12]
    listed = "\n".join(f"  {error:.1e}  {name}" for name, error in shown)
    assert not wrong, f"{len(wrong)} of {len(errors)} quantities differ from one device:\n{listed}"
    return max(errors.values())


def assert_ranks_agree(results: list[Result]) -> None:
    """Every rank reports the same numbers, and copies of a weight are equal bit by bit."""
    assert disagreements(results) == []


def assert_traffic(results: list[Result], run: RunSpec) -> None:
    """Every rank sent exactly what the formulas say, so nothing is gathered without need."""
    for result in results:
        assert result.communication is not None, "run the case with records_traffic=True"
        expected = expected_traffic(run, result.rank)
        missing, surplus = expected - result.communication, result.communication - expected
        assert not missing and not surplus, f"rank {result.rank}: missing {missing}, not expected {surplus}"


def assert_state_bytes(results: list[Result], run: RunSpec) -> None:
    """No rank held more than its share of parameters, gradients and optimizer states."""
    num_states = 2 if run.optim.kind == "adamw" else 1
    for result in results:
        held, (least, most) = result.held, gradient_bytes(run, result.stage)
        message = f"rank {result.rank} holds {held}"
        assert held.parameters == expected_parameter_bytes(run, result.stage), message
        assert least <= held.gradients <= most, message
        assert held.optimizer <= most_optimizer_bytes(run, result.stage, num_states), message


def prove(ranks: RankPool, run: RunSpec, *, frozen: tuple[str, ...] = ()) -> list[Result]:
    """Three steps of a run equal the oracle's."""
    results = run_case(ranks, run, frozen=frozen)
    assert_same_training(results, reference(run, frozen=frozen))
    return results


def prove_with_optimizers(
    ranks: RankPool, run: RunSpec, kinds: Sequence[str] = tuple(OPTIMIZERS), **job: Any
) -> tuple[list[Result], float]:
    """SGD shows a wrong scale of the gradient, which Adam hides; Adam shows a wrong state.

    Returns the results of the last optimizer and the worst relative error of all. `job` are fields of Job.
    """
    runs = [run.with_(optim=OPTIMIZERS[kind]) for kind in kinds]
    every = run_cases(ranks, runs, **job)
    pairs = zip(runs, every, strict=True)
    return every[-1], max(assert_same_training(results, reference(one)) for one, results in pairs)
