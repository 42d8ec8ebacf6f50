"""Dynamic loss scaling for fp16; equal on every rank, because it follows the global gradient norm."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshwright.spec import LossScaleSpec


@dataclasses.dataclass
class LossScale:
    """The loss scale: it shrinks on overflow, when the step is skipped, and grows after clean steps."""

    spec: LossScaleSpec
    scale: float
    num_clean_steps: int = 0
    num_overflows: int = 0
    """Overflows since the scale last grew, up to the hysteresis."""

    @classmethod
    def start(cls, spec: LossScaleSpec) -> "LossScale":
        """A loss scale at its initial value."""
        return cls(spec=spec, scale=spec.initial)

    def update(self, grad_norm: float) -> bool:
        """Adjust the scale after a step; False means that the step must be skipped."""
        if not math.isfinite(grad_norm):
            self._shrink()
            self.num_clean_steps = 0
            return False
        self.num_clean_steps += 1
        if self.num_clean_steps == self.spec.growth_steps:
            self.scale *= self.spec.growth_factor
            self.num_clean_steps = 0
            self.num_overflows = 0
        return True

    def _shrink(self) -> None:
        """Lower the scale once the hysteresis is used up, down to the minimum."""
        self.num_overflows = min(self.num_overflows + 1, self.spec.hysteresis)
        if self.num_overflows == self.spec.hysteresis:
            self.scale = max(self.scale * self.spec.backoff_factor, self.spec.minimum or 0.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        names = ("scale", "num_clean_steps", "num_overflows")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint stored; older ones did not count overflows."""
        self.scale, self.num_clean_steps = state["scale"], state["num_clean_steps"]
        self.num_overflows = state.get("num_overflows", 0)
