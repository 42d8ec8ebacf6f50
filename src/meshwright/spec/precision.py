"""In which number formats a step computes, keeps weights and sums gradients."""

from typing import Literal

from meshwright.spec.base import Positive, PositiveNumber, Spec


class LossScaleSpec(Spec):
    """Dynamic loss scaling for fp16: halve on overflow and skip, grow after clean steps."""

    initial: PositiveNumber = 65536.0
    growth_factor: PositiveNumber = 2.0
    backoff_factor: PositiveNumber = 0.5
    growth_steps: Positive = 2000


class PrecisionSpec(Spec):
    """Weights and optimizer states are fp32 (fp64 when computing in fp64); `compute` is for matmuls."""

    compute: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaleSpec | None = None
    """Present exactly when compute is fp16."""
