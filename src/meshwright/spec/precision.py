"""In which number formats a step computes, keeps weights and sums gradients."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from meshwright.spec.base import Fraction, NonNegative, Positive, PositiveNumber, Spec


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


class Fp8Spec(Spec):
    """fp8 in the linear layers of the blocks; head, norms, attention, router and routed experts stay out."""

    recipe: Literal["current", "delayed", "blocks", "mxfp8"] = "current"
    """current: one scale per tensor, E4M3, gradients of outputs E5M2. delayed: the same with scales from
    earlier steps, which saves a pass over each tensor. blocks: one scale per 1x128 of inputs
    and gradients and per 128x128 of weights, E4M3. mxfp8: one scale per 32, E4M3."""
    bf16_ends: NonNegative = 1
    """Blocks at each end of the model that stay in bf16."""
    cast_weights: Literal["per_microbatch", "per_step"] = "per_microbatch"
    """per_microbatch: weights are cast when they are used. per_step: once per update, kept; that is faster
    and takes two bytes per weight more; needs weights that stay on the device as wholes, so not ZeRO-3 and
    not offloaded. The numbers are the same."""
    history_steps: Positive = 16
    """delayed: steps whose largest magnitudes count."""
    compare_every_steps: Positive | None = None
    """Every k steps one micro-batch runs in fp8 and in bf16 on the same weights and the gradients of each
    block are compared; None: never."""
    min_gradient_cosine: Fraction = 0.95
    """With compare_every_steps: a block whose gradients have a smaller cosine falls back to bf16 and stays
    there."""


def _of_recipe(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else value


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
    fp8: Annotated[Fp8Spec | None, BeforeValidator(_of_recipe)] = None
    """Linear layers of the blocks in fp8; a recipe's name alone takes the defaults of the rest. Everything
    else stays in `compute`, which is then bf16 (or fp64, for proofs)."""
