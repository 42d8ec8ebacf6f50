"""The learning rate over the run."""

from typing import Literal

from meshwright.spec.base import Fraction, NonNegative, Positive, Spec


class ScheduleSpec(Spec):
    """A pure function of the step: warm-up, then a shape."""

    num_steps: Positive
    """Optimizer updates in the whole run."""
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear rise from zero to the peak."""
    final_ratio: Fraction = 0.1
    """Rate at the end as a part of the peak (cosine, linear, wsd)."""
    decay_steps: NonNegative = 0
    """wsd only: steps of the final linear decay."""
