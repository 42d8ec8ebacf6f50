"""In which number formats a step computes, keeps weights and sums gradients."""

from typing import Literal

from meshwright.spec.base import Positive, PositiveNumber, Spec


class LossScaleSpec(Spec):
    """Dynamic loss scaling for fp16: halve on overflow and skip, grow after clean steps."""

    initial: PositiveNumber = 65536.0
    """The scale of the first step."""
    growth_factor: PositiveNumber = 2.0
    """The scale is multiplied by this after growth_steps clean steps."""
    backoff_factor: PositiveNumber = 0.5
    """The scale is multiplied by this after an overflow, and the step is skipped."""
    growth_steps: Positive = 2000
    """Clean steps before the scale grows."""


class PrecisionSpec(Spec):
    """fp32 throughout by default (fp64 when computing in fp64); `compute` is for matmuls."""

    compute: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Format of matmuls and activations."""
    weights: Literal["fp32", "bf16_exact", "bf16_stochastic"] = "fp32"
    """How weights are kept. bf16_exact: in bf16, and the optimizer keeps the lower 16 bits of their exact
    fp32 values. bf16_stochastic: in bf16 alone, rounded at random so that small updates count on average.
    Both need compute=bf16."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are kept and added up over micro-batches and ranks; bf16 goes with weights
    in bf16."""
    loss_scale: LossScaleSpec | None = None
    """Present exactly when compute is fp16."""
