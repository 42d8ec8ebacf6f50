"""What is measured on a batch before its step, at the few steps where it is due. Training is not changed."""

from typing import Any

from meshwright.spec.resilience import ReplaySpec
from meshwright.train.build import seed_step
from meshwright.train.job import Job
from meshwright.train.noise_scale import HalfBatchGradient
from meshwright.train.record import Recorder
from meshwright.train.state import TrainState
from meshwright.train.step_replay import StepReplay
from meshwright.train.unchanged_buffers import unchanged_buffers


def probe_batch(job: Job, recorder: Recorder, batch: Any, state: TrainState) -> HalfBatchGradient | None:
    """Measure the noise scale's half batch, compare fp8 with bf16, and count histograms, where due; all ranks
    call it.

    The half batch's gradient is completed by the step, so it is returned; the others are recorded here.
    """
    half_batch = _measure_half_batch(job, batch, state)
    comparison = job.fp8_comparison
    if comparison is not None and comparison.is_due(state.step):
        recorder.record_fp8(state, comparison.compare(batch, seed=state.num_batches))
    histograms = job.histograms
    if histograms is not None and histograms.is_due(state.step):
        seed_step(job.run.seed, state.num_batches)
        recorder.record_histograms(state, histograms.measure(batch))
    return half_batch


def first_run(job: Job, batch: Any, state: TrainState) -> StepReplay | None:
    """The first of the two runs of forward and backward of the next step, where it is due to be replayed; all
    ranks call it. Weights, buffers and gradients are as before."""
    replay = job.run.resilience.replay
    if replay is None or (state.step + 1) % replay.every_steps:
        return None
    return _run_once(job, batch, state, replay)


def _run_once(job: Job, batch: Any, state: TrainState, replay: ReplaySpec) -> StepReplay:
    training, program = job.training, job.training.program
    seed_step(job.run.seed, state.num_batches)
    program.gradient_hashes.start()
    with unchanged_buffers(program.stages):
        loss = program.accumulate(batch.microbatches, scale=training.scale)
    kept = StepReplay(
        step=state.step + 1,
        loss=loss,
        shards=training.named_shards,
        own_gradients=program.gradient_hashes,
        action=replay.on_difference,
    )
    training.optimizer.zero_grad()
    return kept


def _measure_half_batch(job: Job, batch: Any, state: TrainState) -> HalfBatchGradient | None:
    noise = job.run.observe.noise_scale
    if noise is None or job.measure_half_batch is None or (state.step + 1) % noise.every_steps:
        return None
    seed_step(job.run.seed, state.num_batches)
    return job.measure_half_batch(batch)
