"""Dynamic loss scaling for fp16; equal on every rank, because it follows the global gradient norm."""

import dataclasses
import math

from meshwright.spec import LossScaleSpec


@dataclasses.dataclass
class LossScale:
    """The loss scale: it shrinks on overflow, when the step is skipped, and grows after clean steps."""

    spec: LossScaleSpec
    scale: float
    num_clean_steps: int = 0

    @classmethod
    def start(cls, spec: LossScaleSpec) -> "LossScale":
        """A loss scale at its initial value."""
        return cls(spec=spec, scale=spec.initial)

    def update(self, grad_norm: float) -> bool:
        """Adjust the scale after a step; False means that the step must be skipped."""
        if not math.isfinite(grad_norm):
            self.scale *= self.spec.backoff_factor
            self.num_clean_steps = 0
            return False
        self.num_clean_steps += 1
        if self.num_clean_steps == self.spec.growth_steps:
            self.scale *= self.spec.growth_factor
            self.num_clean_steps = 0
        return True
