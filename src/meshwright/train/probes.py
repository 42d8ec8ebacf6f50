"""What is measured on a batch before its step, at the few steps where it is due. Training is not changed."""

from typing import Any

from meshwright.train.build import seed_step
from meshwright.train.job import Job
from meshwright.train.noise_scale import HalfBatchGradient
from meshwright.train.record import Recorder
from meshwright.train.state import TrainState


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


def _measure_half_batch(job: Job, batch: Any, state: TrainState) -> HalfBatchGradient | None:
    noise = job.run.observe.noise_scale
    if noise is None or job.measure_half_batch is None or (state.step + 1) % noise.every_steps:
        return None
    seed_step(job.run.seed, state.num_batches)
    return job.measure_half_batch(batch)
