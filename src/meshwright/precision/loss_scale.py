"""Dynamic loss scaling for fp16, agreed by all ranks because it looks only at the global norm."""

import dataclasses
import math

from meshwright.spec import LossScaleSpec


@dataclasses.dataclass
class LossScale:
    """S multiplies the loss; on overflow S shrinks and the step is skipped; clean steps let it grow."""

    spec: LossScaleSpec
    scale: float
    num_clean_steps: int = 0

    @classmethod
    def start(cls, spec: LossScaleSpec) -> "LossScale":
        """At the initial scale."""
        return cls(spec=spec, scale=spec.initial)

    def update(self, grad_norm: float) -> bool:
        """Adjust S after a step; True when the step is sound, False when it must be skipped."""
        if not math.isfinite(grad_norm):
            self.scale *= self.spec.backoff_factor
            self.num_clean_steps = 0
            return False
        self.num_clean_steps += 1
        if self.num_clean_steps == self.spec.growth_steps:
            self.scale *= self.spec.growth_factor
            self.num_clean_steps = 0
        return True
