"""Metrics, evaluation and what else a run logs."""

from meshwright.spec.base import Positive, Spec


class EvaluateSpec(Spec):
    """Evaluation loss on the held-out sequences."""

    every_steps: Positive
    """Steps between evaluations."""


class NoiseScaleSpec(Spec):
    """Estimate of the gradient noise scale: the batch beyond which more tokens per step help little."""

    every_steps: Positive
    """Steps between estimates; each estimate costs one more forward and backward."""


class ObserveSpec(Spec):
    """Logging; metrics.jsonl is always written."""

    every_steps: Positive = 1
    """Steps between reads of the metrics from the device; other steps have no host sync."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    evaluate: EvaluateSpec | None = None
    noise_scale: NoiseScaleSpec | None = None
