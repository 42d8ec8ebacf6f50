"""`fit`: trains a user module on a dataset with a loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError, SpecError
from meshwright.launch.parent import end_with_launcher
from meshwright.mesh import Mesh, World, build_mesh, join_world, leave_world
from meshwright.modules.build_training import build_module_training, require_directory, require_module
from meshwright.modules.chain import Chain
from meshwright.modules.chain_program import ChainProgram
from meshwright.modules.dataset import (
    DatasetBatches,
    LoaderOptions,
    SampleAssignment,
    SampleSet,
    load_microbatches,
    one_pass,
    require_samples,
)
from meshwright.modules.module_program import Loss, ModuleProgram
from meshwright.parallel.program import Program
from meshwright.spec.keywords import FitSettings
from meshwright.spec.modules import FitSpec
from meshwright.spec.settings import read_settings, with_data_parallel
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
    dataset: SampleSet,
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

    `loss(model, batch)` returns (sum, count) of a batch that `collate` (torch's default) made from samples.
    `evaluation` holds samples for `evaluate={"every_steps": n}`. `settings` are the fields of `FitSpec`;
    `run` is a YAML file of them. The ranks are those that torchrun started; plain Python is one rank. Started
    again with the same directory, it resumes from the last checkpoint.
    """
    spec = read_settings(FitSpec, run, settings)
    require_directory(directory)
    run_dir = Path(directory) if directory is not None else Path("runs") / spec.name
    require_module(model.model if isinstance(model, Chain) else model)
    _require_stop(stop_after)
    was_joined = dist.is_initialized()
    end_with_launcher()
    world = join_world(spec.device, resilience=spec.resilience, launch=spec.launch, run_dir=run_dir)
    try:
        spec = with_data_parallel(spec, world.num_ranks)
        data = _Data(dataset, evaluation, collate)
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


class _Data:
    """The datasets of a run and how their samples become batches."""

    def __init__(self, training: SampleSet, evaluation: SampleSet | None, collate: Any) -> None:
        self.training, self.evaluation, self.collate = training, evaluation, collate

    def require(self, spec: FitSpec) -> None:
        """Refuse datasets that the spec cannot use."""
        require_samples(self.training)
        if self.evaluation is not None:
            require_samples(self.evaluation, where="evaluation")
        if spec.parallel.pp > 1 and spec.data.max_epochs:
            _require_full_batches(spec.data.max_epochs * len(self.training), spec)
        if (self.evaluation is None) != (spec.observe.evaluate is None):
            given = "evaluation" if spec.observe.evaluate is None else "observe.evaluate"
            missing = "observe.evaluate" if spec.observe.evaluate is None else "evaluation"
            raise SpecError(
                f"{given} without {missing}: nothing would be evaluated",
                where=missing,
                hint="set both: evaluation=dataset, evaluate={'every_steps': 100}",
            )

    def first(self, spec: FitSpec) -> Any:
        """A micro-batch on the CPU, on which pp and cp are verified; None where both are 1."""
        if spec.parallel.num_stages == 1 and spec.parallel.cp == 1:
            return None
        sample_ids = list(range(min(spec.microbatch_samples, len(self.training))))
        return next(iter(load_microbatches(self.training, [sample_ids], LoaderOptions(self.collate))))

    def batches(self, spec: FitSpec, mesh: Mesh) -> DatasetBatches:
        """The training batches of this rank."""
        data = spec.data
        return DatasetBatches(
            self.training,
            SampleOrder(len(self.training), spec.seed, data.shuffle),
            self.assignment(spec, mesh),
            batch_samples=data.batch_samples,
            num_samples=data.max_epochs * len(self.training) if data.max_epochs else None,
            sample_tokens=data.sample_tokens,
            device=mesh.device,
            options=self.options(spec, mesh),
        )

    def assignment(self, spec: FitSpec, mesh: Mesh) -> SampleAssignment:
        """Which samples of a batch this rank gets."""
        return SampleAssignment(spec.microbatch_samples, mesh.dp_rank, spec.parallel.dp)

    def options(self, spec: FitSpec, mesh: Mesh) -> LoaderOptions:
        """How samples are loaded."""
        return LoaderOptions(self.collate, spec.data.num_workers, mesh.device.type == "cuda")


def _require_full_batches(num_samples: int, spec: FitSpec) -> None:
    if num_samples % spec.data.batch_samples:
        raise DataError(
            f"max_epochs={spec.data.max_epochs} leaves {num_samples % spec.data.batch_samples} samples for a "
            "last batch, and a pipeline needs full batches",
            where="data.max_epochs",
            hint="leave data.max_epochs out, choose batch_samples that divides, or use pp=1",
        )


def _job(model: nn.Module | Chain, data: _Data, loss: Loss, spec: FitSpec, world: World) -> Job:
    mesh = build_mesh(spec.parallel, world)
    module = model.model if isinstance(model, Chain) else model
    num_parameters = sum(one.numel() for one in module.parameters())
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


def _evaluate(data: _Data, program: Program, spec: FitSpec, mesh: Mesh) -> float:
    """Loss sum over the evaluation samples / their count; all ranks call it. Host sync."""
    assert data.evaluation is not None and isinstance(program, ModuleProgram | ChainProgram)
    microbatches = one_pass(
        data.evaluation, data.assignment(spec, mesh), device=mesh.device, options=data.options(spec, mesh)
    )
    return float(sum_over_world(program.evaluate(microbatches), mesh))
