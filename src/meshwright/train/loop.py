"""The loop: batch, step, record, save, until the steps are done or somebody asks to stop."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from meshwright.checkpoint.initial import load_initial_weights
from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.mesh import World, build_mesh
from meshwright.optim.schedule import learning_rate
from meshwright.resilience.interrupt import listening
from meshwright.resilience.shortage import GuardedProgram, Lookout, shortage_behind
from meshwright.spec import RunSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.carried import Carried, carry, put_back
from meshwright.train.evaluate import evaluate
from meshwright.train.fp8_shadow import Shadow
from meshwright.train.gc_control import collect_young, collector_off
from meshwright.train.job import Job
from meshwright.train.noise_scale import PartGradient, measure_part
from meshwright.train.record import Recorder, token_workload
from meshwright.train.state import TrainState
from meshwright.train.step import train_step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    kind: Literal["finished", "interrupted", "short"]
    state: TrainState
    carried: Carried | None = None
    """short: a rank ran out of memory, and this is what a smaller micro-batch goes on from."""


def train(
    run: RunSpec,
    world: World,
    run_dir: Path,
    *,
    stop_after: int | None = None,
    carried: Carried | None = None,
    attempt: int = 0,
) -> Outcome:
    """Run to the end, from the beginning or from the last checkpoint in `run_dir`; all ranks call it.

    `stop_after` stops at a step on the way, on the very course of the whole run. `carried` is what an
    attempt that ran out of memory left.
    """
    mesh = build_mesh(run.parallel, world)
    training = build_training(run, mesh)
    goes_on = run.memory.on_oom == "halve_microbatch"
    training.program = GuardedProgram(training.program, Lookout(world, attempt, goes_on=goes_on))
    job = Job(
        run=run,
        mesh=mesh,
        training=training,
        batches=build_data(run, mesh),
        workload=token_workload(run),
        load_initial=lambda: load_initial_weights(run, training),
        evaluate=lambda: evaluate(run, training.program, mesh),
        measure_part=lambda batch: measure_part(training, batch, mesh),
        shadow=Shadow(run, training, mesh) if run.precision.fp8 else None,
    )
    return drive(job, run_dir, stop_after=stop_after, carried=carried)


def drive(
    job: Job, run_dir: Path, *, stop_after: int | None = None, carried: Carried | None = None
) -> Outcome:
    """The loop itself; all ranks call it."""
    run, training, batches = job.run, job.training, job.batches
    last_step = min(run.schedule.num_steps, stop_after or run.schedule.num_steps)
    checkpoints = Checkpoints(run, run_dir / "checkpoints", training, batches, fp8_fallback=job.shadow)
    state = put_back(carried, job) if carried is not None else _restore_or_start(job, checkpoints)

    with Recorder(job, run_dir, state) as recorder, listening() as interrupt, collector_off():
        while state.step < last_step:
            position = batches.state()
            batch = next(batches, None)
            if batch is None:  # max_epochs: the data is used up
                break
            batch_tokens = run.data.batch_tokens_of(state.num_batches)
            rate = learning_rate(run.optim, run.schedule, state.step, batch_tokens=batch_tokens)

            try:
                part = _part_when_due(job, batch, state)
                _compare_with_bf16(job.shadow, recorder, batch, state)
                seed_step(run.seed, state.num_batches)
                outcome = train_step(training, batch, learning_rate=rate)
            except Exception as error:
                shortage = shortage_behind(error, training.program, rank=job.mesh.rank)
                if shortage is None:
                    raise
                recorder.run_short(shortage, state)
                batches.close()
                return Outcome("short", state, carry(job, state, position))

            if outcome.is_skipped:
                state = state.after_skip()
                recorder.skip(state)
                continue
            state = state.after_step(tokens=batch.num_positions)
            is_evaluated = run.observe.evaluate and _due(run.observe.evaluate.every_steps, state.step)
            is_last = state.step == last_step
            is_observed = is_evaluated or part or is_last or _due(run.observe.every_steps, state.step)
            if is_observed:  # the one place where the host waits for the device
                evaluation = job.evaluate if is_evaluated else None
                state = recorder.record(state, outcome, rate, evaluation=evaluation, part=part)
                collect_young()
            if _due(run.checkpoint.every_steps, state.step) and not is_last:
                recorder.attempt_save(checkpoints, state)
            if is_observed and interrupt.agreed():
                last_step = state.step

        batches.close()
        if checkpoints.saved_step != state.step:
            recorder.save_last(checkpoints, state)
        is_cut_short = last_step <= state.step < run.schedule.num_steps
        kind = "interrupted" if is_cut_short else "finished"
        return Outcome(kind, recorder.end(kind, state))


def _part_when_due(job: Job, batch: Any, state: TrainState) -> PartGradient | None:
    """What the noise scale compares a batch with, at the steps that estimate it."""
    noise = job.run.observe.noise_scale
    if noise is None or job.measure_part is None or not _due(noise.every_steps, state.step + 1):
        return None
    seed_step(job.run.seed, state.num_batches)
    return job.measure_part(batch)


def _restore_or_start(job: Job, checkpoints: Checkpoints) -> TrainState:
    saved = checkpoints.restore()
    if saved is not None:
        return TrainState.from_facts(saved)
    job.load_initial()
    return TrainState()


def _compare_with_bf16(shadow: Shadow | None, recorder: Recorder, batch: Any, state: TrainState) -> None:
    """fp8, where it is due: leaves no trace in the training but blocks that fall back."""
    if shadow is not None and shadow.is_due(state.step):
        recorder.shadow(state, shadow.compare(batch, seed=state.num_batches))


def _due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0
