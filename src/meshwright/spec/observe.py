"""What is written down while a run runs."""

from meshwright.spec.base import Positive, Spec


class EvaluateSpec(Spec):
    """Loss on the held-out sequences at intervals."""

    every_steps: Positive
    """Evaluate this often."""


class NoiseScaleSpec(Spec):
    """Estimates the gradient noise scale: the batch beyond which more tokens per step help little."""

    every_steps: Positive
    """Estimate this often; each time costs one more forward and backward."""


class ObserveSpec(Spec):
    """metrics.jsonl is always written."""

    every_steps: Positive = 1
    """Metrics are gathered from the device this often; in between the step does not wait for the host."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    evaluate: EvaluateSpec | None = None
    noise_scale: NoiseScaleSpec | None = None
