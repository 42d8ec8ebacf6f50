"""The loop: batch, step, record, save, until the steps are done or a signal asks to stop."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.checkpoint.source_files import keep_start_files
from meshwright.mesh import World
from meshwright.optim.schedule import learning_rate
from meshwright.resilience.interrupt import stop_signals
from meshwright.spec import RunSpec
from meshwright.train import bad_steps, messages
from meshwright.train.build import build_job, seed_step
from meshwright.train.data_retry import is_stop_agreed
from meshwright.train.early_stopping import has_stopped_early
from meshwright.train.gc_control import collect_garbage, gc_paused
from meshwright.train.job import Job
from meshwright.train.oom_report import oom_explained
from meshwright.train.probes import first_run, probe_batch
from meshwright.train.record import Recorder
from meshwright.train.replica_check import compare_replicas
from meshwright.train.state import TrainState
from meshwright.train.step import train_step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    kind: Literal["finished", "interrupted"]
    state: TrainState


def train(
    run: RunSpec, world: World, run_dir: Path, *, stop_after: int | None = None, quiet: bool = False
) -> Outcome:
    """Build a run and train it in `run_dir`, from its newest checkpoint there; all ranks call it."""
    return drive(build_job(run, world), run_dir, stop_after=stop_after, quiet=quiet)


def drive(job: Job, run_dir: Path, *, stop_after: int | None = None, quiet: bool = False) -> Outcome:
    """Train to the last step, or to step `stop_after`, whose result equals that of the full run there."""
    run, training, batches = job.run, job.training, job.batches
    last_step = min(run.schedule.num_steps, stop_after or run.schedule.num_steps)
    checkpoints = Checkpoints(
        run, run_dir / "checkpoints", training, batches, fp8_fallback=job.fp8_comparison
    )
    state = _restore_or_start(job, checkpoints, run_dir)
    if state.step and (
        state.step >= run.schedule.num_steps or batches.is_exhausted or has_stopped_early(run.observe, state)
    ):
        return _already_finished(job, state, checkpoints, quiet=quiet)

    with (
        Recorder(job, run_dir, state, resumed_from=checkpoints, quiet=quiet) as recorder,
        checkpoints,
        oom_explained(job, recorder, run_dir),
        stop_signals() as interrupt,
        gc_paused(),
    ):
        while state.step < last_step:
            batch = next(batches, None)
            if batch is None:  # max_epochs: the data is used up
                break
            batch_tokens = run.data.batch_tokens_of(state.num_batches)
            lr = learning_rate(run.optim, run.schedule, state.step, batch_tokens=batch_tokens)
            half_batch = probe_batch(job, recorder, batch, state)
            replay = first_run(job, batch, state)

            seed_step(run.seed, state.num_batches)
            norm_limit = bad_steps.norm_limit(run.resilience.bad_steps, state)
            loss_limit = bad_steps.loss_limit(run, state)
            outcome = train_step(
                training,
                batch,
                learning_rate=lr,
                norm_limit=norm_limit,
                loss_limit=loss_limit,
                replay=replay,
            )
            recorder.record_replay(outcome)
            state = state.after_skip() if outcome.is_skipped else state.after_step(batch.num_positions)

            if outcome.is_skipped:  # the weights are as before
                state = bad_steps.after_skip(job, checkpoints, recorder, state, outcome)
                continue
            if norm_limit is not None:
                # Both are known on the host already.
                state = state.after_good_step(float(outcome.grad_norm), outcome.global_loss)
            compare_replicas(job, state)
            is_last, is_due = state.step == last_step, checkpoints.is_due(state.step)
            state = recorder.record(state, outcome, lr=lr, is_saved=is_last or is_due, half_batch=half_batch)
            if is_due and not is_last:
                recorder.save(checkpoints, state)
            recorder.record_saved(checkpoints)
            if recorder.recorded_step == state.step:  # the host has waited for the device anyway
                collect_garbage()
            if has_stopped_early(run.observe, state):  # the same on every rank
                recorder.record_early_stop(state)
                break
            if not is_last and is_stop_agreed(job, recorder, interrupt, state):  # no device is waited for
                last_step = state.step

        batches.close()
        recorder.save_last(checkpoints, state)
        is_interrupted = last_step <= state.step < run.schedule.num_steps
        is_ended = not is_interrupted or has_stopped_early(run.observe, state)
        kind = "finished" if is_ended else "interrupted"
        recorder.end(kind, state)
        return Outcome(kind, state)


def _restore_or_start(job: Job, checkpoints: Checkpoints, run_dir: Path) -> TrainState:
    if job.load_base is not None:
        job.load_base()
    saved = checkpoints.restore()
    if saved is not None:
        _prepare_data(job, run_dir, is_resumed=True)
        return TrainState.from_facts(saved)
    job.load_initial_weights()
    if job.mesh.rank == 0:
        keep_start_files(job.run.checkpoint.start_from, run_dir)
    _prepare_data(job, run_dir, is_resumed=False)
    return TrainState()


def _prepare_data(job: Job, run_dir: Path, *, is_resumed: bool) -> None:
    if job.prepare_data is not None:
        job.prepare_data(run_dir, is_resumed=is_resumed)


def _already_finished(job: Job, state: TrainState, checkpoints: Checkpoints, *, quiet: bool) -> Outcome:
    """The outcome of a run without steps left: its directory stays as it is, and a missing copy is made."""
    job.batches.close()
    uploaded = checkpoints.upload_missing(state.step)
    if uploaded is not None and uploaded.error is not None:
        raise messages.last_upload_failed(uploaded.error, checkpoints.root) from None
    if job.mesh.rank == 0 and not quiet:
        print(messages.already_finished(state, job.run, checkpoints.changes), file=sys.stderr)
    return Outcome("finished", state)
