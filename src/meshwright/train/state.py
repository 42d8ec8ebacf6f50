"""Exactly what a resume needs, besides the tensors."""

import dataclasses
from typing import Any, Self

# Of an average over estimates of the noise scale: about the last 20 count.
NOISE_MEMORY = 0.95


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Where a run stands. Randomness needs no state: it is seeded anew from (seed, batch, rank)."""

    step: int = 0
    """Optimizer updates done; the learning rate is a function of this alone."""
    num_skipped: int = 0
    """fp16: batches whose gradients overflowed; they used up data but made no step."""
    tokens: int = 0
    """Positions trained on."""
    train_seconds: float = 0.0
    """Wall time inside steps, over all attempts."""
    last_loss: float | None = None
    last_eval_loss: float | None = None
    best_eval_loss: float | None = None
    gradient_signal: float | None = None
    """Averages over steps of what `train/noise_scale.py` estimates; their ratio is the noise scale."""
    gradient_noise: float | None = None

    @property
    def num_batches(self) -> int:
        """Batches used up."""
        return self.step + self.num_skipped

    def after_step(self, *, tokens: int) -> Self:
        """One update later."""
        return dataclasses.replace(self, step=self.step + 1, tokens=self.tokens + tokens)

    def after_skip(self) -> Self:
        """The batch was used up, the update was not made."""
        return dataclasses.replace(self, num_skipped=self.num_skipped + 1)

    def after_observation(self, *, loss: float, seconds: float) -> Self:
        """The same state with what was seen of it."""
        return dataclasses.replace(self, last_loss=loss, train_seconds=self.train_seconds + seconds)

    def after_evaluation(self, loss: float) -> Self:
        """The same state with its loss on held-out data."""
        best = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)
        return dataclasses.replace(self, last_eval_loss=loss, best_eval_loss=best)

    @property
    def noise_scale_tokens(self) -> float | None:
        """None while there is no positive estimate of both."""
        signal, noise = self.gradient_signal or 0.0, self.gradient_noise or 0.0
        return noise / signal if signal > 0 and noise > 0 else None

    def after_estimate(self, *, signal: float, noise: float) -> Self:
        """The same state with one more estimate in the averages."""
        return dataclasses.replace(
            self,
            gradient_signal=_blended(self.gradient_signal, signal),
            gradient_noise=_blended(self.gradient_noise, noise),
        )

    def to_facts(self) -> dict[str, Any]:
        """For the manifest."""
        return dataclasses.asdict(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """From a manifest."""
        return cls(**facts)


def _blended(average: float | None, new: float) -> float:
    return new if average is None else NOISE_MEMORY * average + (1.0 - NOISE_MEMORY) * new
