"""The texts that a run prints and the errors that it ends with."""

import math
from collections.abc import Sequence
from pathlib import Path

from meshwright.checkpoint.saver import SaveOutcome
from meshwright.errors import CheckpointError, RunError
from meshwright.observe.metrics import StepMetrics
from meshwright.observe.prediction_check import device_title
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.adapter import num_trained_parameters
from meshwright.spec.changes import Change
from meshwright.spec.modules import FitSpec
from meshwright.train.early_stopping import has_stopped_early
from meshwright.train.fp8_comparison import Fp8Report
from meshwright.train.job import Job
from meshwright.train.state import TrainState
from meshwright.units import show_count

NO_HOST_COPY = (
    "checkpoints are written while training waits: host memory has no room for a copy of the state "
    "(checkpoint.asynchronous=false sets this)"
)
COMPILING = "compiling: the first step takes up to a minute; the result is cached on disk for the next run"
NOT_COMPILED = (
    "compile has no effect here: torch's compiler skipped every block, as it does where one waits for "
    "the device or another rank inside recompute; compile=false trains the same"
)
# A loss scale this small means that the gradients themselves are not finite.
SMALLEST_LOSS_SCALE = 2.0**-14


def opening(job: Job, run_dir: Path) -> str:
    """The first line of a run: directory, parameters, device and layout."""
    run, default = job.run, ParallelSpec()
    fields = (
        (name, getattr(run.parallel, name), getattr(default, name)) for name in ParallelSpec.model_fields
    )
    layout = " ".join(f"{name}={value}" for name, value, usual in fields if value != usual)
    num_ranks = run.parallel.num_ranks
    ranks = (
        f"{num_ranks} ranks on {device_title(job.mesh.device)}"
        if num_ranks > 1
        else device_title(job.mesh.device)
    )
    return (
        f"{run_dir}: {show_count(job.workload.num_parameters)} parameters{_trained(run)}, {ranks}, "
        f"{layout or 'one device'}, {run.accumulation} micro-batch{'es' * (run.accumulation > 1)} per step"
    )


def _trained(run: RunSpec | FitSpec) -> str:
    """How many parameters fine-tuning updates; empty where it is all of them."""
    if isinstance(run, FitSpec) or (run.adapter is None and not run.train_only):
        return ""
    count = num_trained_parameters(run.model, run.adapter, run.train_only)
    return f", {show_count(count)} trained"


def stopped_early(state: TrainState) -> str:
    """The end of a run by early stopping."""
    return (
        f"step {state.step}: early stopping, {state.evaluations_without_gain} evaluations in a row without a "
        f"loss below {state.stopping_eval_loss:.4f}"
    )


def already_finished(state: TrainState, run: RunSpec | FitSpec, changes: Sequence[Change]) -> str:
    """The only line of a run that has no step left."""
    num_steps = run.schedule.num_steps
    done, setting = f"{state.step} steps, and max_epochs leaves no data", "data.max_epochs"
    if state.step >= num_steps:
        done, setting = f"all {num_steps} steps", "schedule.num_steps"
    elif has_stopped_early(run.observe, state):
        done = f"{state.step} steps, and ended by early stopping"
        setting = "observe.evaluate.early_stopping.patience"
    unused = f"\nwithout effect: {', '.join(map(str, changes))}" if changes else ""
    return f"already finished: this directory has {done}; a larger {setting} trains more{unused}"


def changed(changes: Sequence[Change], *, learning_rate: float, restarts_data: bool) -> list[str]:
    """The lines of a resumed run that has changed settings."""
    lines = [f"changed: {change}" for change in changes]
    if any(change.key.startswith(("optim.", "schedule.", "data.")) for change in changes):
        lines.append(f"the learning rate of the next step is {learning_rate:.4g}")
    if restarts_data:
        lines.append("the samples are other ones than before: the data starts at its beginning")
    return lines


def interrupted(state: TrainState, num_steps: int) -> str:
    """The last line of a run that was asked to stop."""
    return f"stopped at step {state.step} of {num_steps}, which is saved: the same command resumes from there"


def save_failed(step: int, error: CheckpointError) -> str:
    """A save during training that failed."""
    return f"checkpoint at step {step} failed, training continues and tries again: {error.fact}"


def upload_failed(step_name: str, error: CheckpointError) -> str:
    """A copy of a checkpoint that failed."""
    return f"the copy of {step_name} failed, training continues and tries again: {error.fact}"


def last_upload_failed(error: CheckpointError, root: Path) -> RunError:
    """The run ends without a copy of its last checkpoint in the second place."""
    return RunError(
        f"the last checkpoint was saved, and not copied to checkpoint.upload: {error.fact}",
        where=str(root),
        hint="start the same command again when the store answers, or copy the folder yourself",
    )


def save_waited(outcome: SaveOutcome) -> str:
    """A save that had to wait for the one before."""
    return (
        f"step {outcome.step}: waited {outcome.waited_seconds:.1f} s until the last checkpoint was written; "
        "the storage is slower than checkpoint.every_steps"
    )


def fallen_back(state: TrainState, report: Fp8Report) -> str:
    """Blocks of an fp8 run that compute in bf16 from now on."""
    blocks, worst = ", ".join(map(str, report.fallback_layers)), report.worst_layer
    return (
        f"step {state.step}: block {blocks} back to bf16; gradients in fp8 and bf16 have a cosine of "
        f"{report.cosines[worst]:.3f} in block {worst}"
    )


def skipped(state: TrainState, grad_norm: float, loss: float | None = None) -> str:
    """A step without an update."""
    norm = f"gradient norm {grad_norm:g}{_times(grad_norm, state.grad_norm_average)}"
    shown = f", loss {loss:g}{_times(loss, state.loss_average)}" if loss is not None else ""
    return f"step {state.step}: no update with batch {state.num_batches}: {norm}{shown}"


def _times(value: float, average: float | None) -> str:
    return f", {value / average:.1f} times its average" if average and math.isfinite(value) else ""


def rolled_back(state: TrainState, from_step: int) -> str:
    """The run went back to a checkpoint."""
    return (
        f"went back from step {from_step} to the checkpoint of step {state.step}; the data up to batch "
        f"{state.num_batches} is skipped"
    )


def too_many_bad_steps(state: TrainState, grad_norm: float, limit: int) -> RunError:
    """Bad steps one after the other: skipping does not help."""
    return RunError(
        f"{limit} bad steps in a row at step {state.step}; the last gradient norm is {grad_norm:g}",
        where=f"resilience.bad_steps.max_in_a_row={limit}",
        hint="lower optim.lr, lengthen schedule.warmup_steps or set optim.max_grad_norm; "
        "earlier checkpoints are unchanged",
    )


def last_save_failed(error: CheckpointError, root: Path) -> RunError:
    """The run ends without its last checkpoint."""
    return RunError(
        f"the last save failed: {error.fact}",
        where=str(root),
        hint="free disk space, then start the same command again: it resumes from the newest checkpoint",
    )


def overflow(state: TrainState, scale: float) -> RunError:
    """fp16 gradients that overflow with every loss scale."""
    return RunError(
        f"gradients are not finite at step {state.step}, even with a loss scale of {scale:g}",
        where="precision.compute",
        hint="lower optim.lr, or use bf16",
    )


def not_finite(metrics: StepMetrics, run_dir: Path) -> RunError:
    """A loss or gradient norm that is infinite or NaN."""
    return RunError(
        f"loss {metrics.loss:g} or gradient norm {metrics.grad_norm:g} is not finite at step {metrics.step}",
        where=str(run_dir),
        hint="lower optim.lr, lengthen schedule.warmup_steps or set optim.max_grad_norm; "
        "earlier checkpoints are unchanged",
    )
