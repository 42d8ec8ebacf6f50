"""What is written down while a run runs."""

from meshwright.spec.base import Positive, Spec


class EvaluateSpec(Spec):
    """Loss on the held-out sequences at intervals."""

    every_steps: Positive
    """Evaluate this often."""


class ObserveSpec(Spec):
    """metrics.jsonl is always written."""

    every_steps: Positive = 1
    """Metrics are gathered from the device this often; in between the step does not wait for the host."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    evaluate: EvaluateSpec | None = None
