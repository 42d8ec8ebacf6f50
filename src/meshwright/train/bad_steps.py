"""Steps whose gradients are not finite or whose gradient norm or loss is a spike: skipped, or rolled back.

The averages of norm and loss are part of the state that a checkpoint saves, so a resumed run skips the same
steps as one that was never stopped. Both are global: all ranks decide the same.
"""

import math

from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.spec.resilience import BadStepSpec
from meshwright.train import messages
from meshwright.train.job import Job
from meshwright.train.record import Recorder
from meshwright.train.state import TrainState
from meshwright.train.step import LossLimit, StepOutcome

# The first steps have large norms, and their average means little.
_FIRST_STEPS = 20


def norm_limit(spec: BadStepSpec, state: TrainState) -> float | None:
    """The largest gradient norm that makes an update; None where norms are not looked at in every step."""
    if spec.action == "stop":
        return None
    average = state.grad_norm_average
    if spec.spike_factor is None or average is None or state.step < _FIRST_STEPS:
        return math.nextafter(math.inf, 0.0)  # every finite norm
    return spec.spike_factor * average


def loss_limit(run: RunSpec | FitSpec, state: TrainState) -> LossLimit | None:
    """The largest loss that makes an update; None where losses are not looked at in every step."""
    spec, average = run.resilience.bad_steps, state.loss_average
    if spec.action == "stop" or spec.loss_spike_factor is None:
        return None
    is_judged = average is not None and state.step >= _FIRST_STEPS
    value = spec.loss_spike_factor * average if is_judged and average is not None else math.inf
    return LossLimit(value, run.parallel.tp)


def after_skip(
    job: Job, checkpoints: Checkpoints, recorder: Recorder, state: TrainState, outcome: StepOutcome
) -> TrainState:
    """The state after a batch without an update; all ranks call it. RunError after too many in a row."""
    spec, grad_norm = job.run.resilience.bad_steps, float(outcome.grad_norm)
    if spec.action == "stop" or (job.training.loss_scale is not None and not math.isfinite(grad_norm)):
        recorder.record_skip(state)  # fp16: the gradients overflowed, and the loss scale is smaller now
        return state
    state = state.after_bad_step()
    recorder.record_bad_step(state, grad_norm=grad_norm, loss=outcome.global_loss)
    if state.bad_steps_in_a_row >= spec.max_in_a_row:
        raise messages.too_many_bad_steps(state, grad_norm, spec.max_in_a_row)
    return _rolled_back(job, checkpoints, recorder, state) if spec.action == "rollback" else state


def _rolled_back(job: Job, checkpoints: Checkpoints, recorder: Recorder, bad: TrainState) -> TrainState:
    """The state of the newest checkpoint, with the data position of now. Without a checkpoint only the bad
    batch is skipped."""
    recorder.wait_for_save(checkpoints)
    position = job.batches.state()
    saved = checkpoints.restore()
    if saved is None:
        return bad
    state = TrainState.from_facts(saved).with_skipped_data(bad)
    job.batches.load_state({"num_batches": state.num_batches, **position})
    recorder.record_rollback(state, from_step=bad.step)
    return state
