"""The state of a run besides its tensors: exactly what a resume needs."""

import dataclasses
from typing import Any, Self

# Decay of the averages of noise-scale estimates: about the last 20 count.
NOISE_DECAY = 0.95


@dataclasses.dataclass(frozen=True)
class TrainState:
    """How far a run is. Random numbers need no state: each step is seeded from (seed, batch, rank)."""

    step: int = 0
    """Optimizer updates done; the learning rate is a function of this alone."""
    num_skipped: int = 0
    """Batches that used up data but made no step: fp16 overflows, and bad steps that were skipped."""
    tokens: int = 0
    """Positions trained on."""
    train_seconds: float = 0.0
    """Wall time of steps, over all sessions of the run."""
    last_loss: float | None = None
    last_eval_loss: float | None = None
    last_eval_step: int | None = None
    """The step at which `last_eval_loss` was measured."""
    best_eval_loss: float | None = None
    stopping_eval_loss: float | None = None
    """The evaluation loss that later ones are compared with for early stopping."""
    evaluations_without_gain: int = 0
    """Evaluations in a row whose loss was not lower than that."""
    grad_norm_average: float | None = None
    """Average over steps of the gradient norm, where `resilience.bad_steps` looks for spikes."""
    loss_average: float | None = None
    """Average over steps of the loss, where `resilience.bad_steps.loss_spike_factor` is set."""
    bad_steps_in_a_row: int = 0
    gradient_signal: float | None = None
    """Average over steps of the signal that `train/noise_scale.py` estimates."""
    gradient_noise: float | None = None
    """The same for the noise; noise / signal is the noise scale."""

    @property
    def num_batches(self) -> int:
        """Batches taken from the data."""
        return self.step + self.num_skipped

    def after_step(self, tokens: int) -> Self:
        """The state after one more update."""
        return dataclasses.replace(self, step=self.step + 1, tokens=self.tokens + tokens)

    def after_skip(self) -> Self:
        """The state after a batch whose update was skipped."""
        return dataclasses.replace(self, num_skipped=self.num_skipped + 1)

    def after_good_step(self, grad_norm: float, loss: float | None = None) -> Self:
        """The same state with the gradient norm of a good step, and its loss where known, in the averages."""
        norm_average = _moving_average(self.grad_norm_average, grad_norm)
        loss_average = self.loss_average if loss is None else _moving_average(self.loss_average, loss)
        return dataclasses.replace(
            self, grad_norm_average=norm_average, loss_average=loss_average, bad_steps_in_a_row=0
        )

    def after_bad_step(self) -> Self:
        """The same state after one more bad step."""
        return dataclasses.replace(self, bad_steps_in_a_row=self.bad_steps_in_a_row + 1)

    def with_skipped_data(self, bad: Self) -> Self:
        """This state, restored from a checkpoint, after the data that `bad` had taken is skipped."""
        num_skipped = bad.num_batches - self.step
        bad_steps = bad.bad_steps_in_a_row
        return dataclasses.replace(self, num_skipped=num_skipped, bad_steps_in_a_row=bad_steps)

    def after_observation(self, *, loss: float, seconds: float) -> Self:
        """The same state with the loss and wall time that were measured."""
        return dataclasses.replace(self, last_loss=loss, train_seconds=self.train_seconds + seconds)

    def after_evaluation(self, loss: float, *, min_delta: float = 0.0) -> Self:
        """The same state with its loss on held-out data; `min_delta` is that of early stopping."""
        best = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)
        compared = self.stopping_eval_loss
        is_lower = compared is None or loss < compared - min_delta
        return dataclasses.replace(
            self,
            last_eval_loss=loss,
            last_eval_step=self.step,
            best_eval_loss=best,
            stopping_eval_loss=loss if is_lower else compared,
            evaluations_without_gain=0 if is_lower else self.evaluations_without_gain + 1,
        )

    @property
    def noise_scale_tokens(self) -> float | None:
        """The gradient noise scale in tokens; None while signal or noise has no positive estimate."""
        signal, noise = self.gradient_signal or 0.0, self.gradient_noise or 0.0
        return noise / signal if signal > 0 and noise > 0 else None

    def after_estimate(self, *, signal: float, noise: float) -> Self:
        """The same state with one more estimate of the noise scale in its averages."""
        return dataclasses.replace(
            self,
            gradient_signal=_moving_average(self.gradient_signal, signal),
            gradient_noise=_moving_average(self.gradient_noise, noise),
        )

    def to_facts(self) -> dict[str, Any]:
        """The state as plain values, for the manifest of a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """The state from the values of a manifest."""
        return cls(**facts)


def _moving_average(average: float | None, new: float) -> float:
    return new if average is None else NOISE_DECAY * average + (1.0 - NOISE_DECAY) * new
