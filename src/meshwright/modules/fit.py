"""`fit`: trains a user module on a dataset with a loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn

from meshwright.errors import SpecError
from meshwright.launch.parent import end_with_launcher
from meshwright.mesh import Mesh, World, build_mesh, join_world, leave_world
from meshwright.modules.advice import ModuleRun, print_advice
from meshwright.modules.build_training import build_module_training, require_directory, require_module
from meshwright.modules.chain import Chain
from meshwright.modules.chain_program import ChainProgram
from meshwright.modules.dataset import SampleSet, one_pass
from meshwright.modules.module_program import Loss, ModuleProgram
from meshwright.modules.training_data import FitData, TrainingInput, read_fit_settings
from meshwright.parallel.program import Program
from meshwright.spec.keywords import FitSettings
from meshwright.spec.modules import FitSpec
from meshwright.spec.settings import with_data_parallel
from meshwright.train.capacity import capacity_error
from meshwright.train.evaluate import sum_over_world
from meshwright.train.job import Job
from meshwright.train.loop import Outcome, drive
from meshwright.train.session import claimed_directory
from meshwright.train.workload import Workload
from meshwright.user_errors import errors_end_at_caller


@errors_end_at_caller
def fit(
    model: nn.Module | Chain,
    dataset: TrainingInput,
    loss: Loss,
    *,
    evaluation: SampleSet | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    run: str | Path | None = None,
    directory: str | Path | None = None,
    stop_after: int | None = None,
    **settings: Unpack[FitSettings],
) -> Outcome:
    """Train a module, in place, and write the same run directory as `meshwright train`.

    `dataset` is map-style, a torch DataLoader over one (its settings are kept, its batch size is the
    micro-batch), or a loader of `meshwright.open_loader`. `loss(model, batch)` returns (sum, count) of a
    batch that `collate` (torch's default) made from samples.
    `evaluation` holds samples for `evaluate={"every_steps": n}`. `settings` are the fields of `FitSpec`;
    `run` is a YAML file of them. The ranks are those that torchrun started; plain Python is one rank. Started
    again with the same directory, it resumes from the last checkpoint.
    """
    spec = read_fit_settings(dataset, run, settings)
    data = FitData(dataset, evaluation, collate)
    require_directory(directory)
    run_dir = Path(directory) if directory is not None else Path("runs") / spec.name
    require_module(model.model if isinstance(model, Chain) else model)
    _require_stop(stop_after)
    was_joined = dist.is_initialized()
    end_with_launcher()
    world = join_world(spec.device, resilience=spec.resilience, launch=spec.launch, run_dir=run_dir)
    try:
        spec = with_data_parallel(spec, world.num_ranks)
        data.require(spec)
        with claimed_directory(spec, run_dir):
            return drive(_job(model, data, loss, spec, world), run_dir, stop_after=stop_after)
    except OSError as error:
        raise capacity_error(error, run_dir, rank=world.rank) or error from None
    finally:
        if not was_joined:
            leave_world()


def _require_stop(stop_after: int | None) -> None:
    if stop_after is not None and stop_after < 1:
        raise SpecError(
            f"stop_after is {stop_after}", where="stop_after", hint="use at least 1, or leave it out"
        )


def _job(model: nn.Module | Chain, data: FitData, loss: Loss, spec: FitSpec, world: World) -> Job:
    mesh = build_mesh(spec.parallel, world)
    module = model.model if isinstance(model, Chain) else model
    num_parameters = sum(one.numel() for one in module.parameters())
    if mesh.rank == 0:
        is_measured = data.loader is not None or spec.data.num_workers == "auto"
        options = None if is_measured else data.options(spec, mesh)
        print_advice(ModuleRun(module, spec, options), mesh.device)
    training = build_module_training(model, loss, spec, mesh, data.first(spec))
    return Job(
        run=spec,
        mesh=mesh,
        training=training,
        batches=data.batches(spec, mesh),
        workload=Workload(
            num_parameters,
            None,
            lambda: None,
            counted="samples" if spec.data.sample_tokens == 1 else "tokens",
        ),
        load_initial_weights=lambda: None,
        evaluate=lambda: _evaluate(data, training.program, spec, mesh),
    )


def _evaluate(data: FitData, program: Program, spec: FitSpec, mesh: Mesh) -> float:
    """Loss sum over the evaluation samples / their count; all ranks call it. Host sync."""
    assert data.evaluation is not None and isinstance(program, ModuleProgram | ChainProgram)
    microbatches = one_pass(
        data.evaluation,
        data.assignment(spec, mesh),
        device=mesh.device,
        options=data.evaluation_options(spec, mesh),
    )
    return float(sum_over_world(program.evaluate(microbatches), mesh))
