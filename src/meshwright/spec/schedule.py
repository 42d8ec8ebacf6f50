"""The learning-rate schedule."""

from typing import Literal

from meshwright.spec.base import Fraction, NonNegative, Positive, Spec

ScheduleKind = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]


class ScheduleSpec(Spec):
    """The learning rate as a pure function of the step: linear warm-up, then decay."""

    num_steps: Positive
    """Optimizer updates of the run."""
    kind: ScheduleKind = "cosine"
    """Schedule after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from zero to the peak."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate / peak learning rate (cosine, linear, wsd)."""
    decay_steps: NonNegative = 0
    """wsd only: steps of the final linear decay."""
