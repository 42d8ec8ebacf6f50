"""Dtypes of matmuls, weights and gradients; fp8 and loss scaling."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from meshwright.spec.base import Fraction, NonNegative, Positive, PositiveNumber, Spec

Fp8Recipe = Literal["current", "delayed", "blockwise", "mxfp8"]
CastWeights = Literal["per_microbatch", "per_step"]
ComputeDtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
WeightDtype = Literal["fp32", "bf16_exact", "bf16_stochastic"]
GradientDtype = Literal["fp32", "bf16"]


class LossScaleSpec(Spec):
    """Dynamic loss scaling for fp16: skip the step and lower the scale on overflow, else raise it."""

    initial: PositiveNumber = 65536.0
    """Scale of the first step."""
    growth_factor: PositiveNumber = 2.0
    """Factor on the scale after growth_steps clean steps."""
    backoff_factor: PositiveNumber = 0.5
    """Factor on the scale after an overflow; the step is skipped."""
    growth_steps: Positive = 2000
    """Steps without overflow before the scale grows."""
    hysteresis: Positive = 1
    """Overflows before the scale shrinks: 2 keeps it at the first one. Counted anew when the scale grows."""
    minimum: PositiveNumber | None = None
    """The scale never shrinks below this; null sets no limit."""


class Fp8Spec(Spec):
    """fp8 matmuls in the linear layers of the blocks, and in routed experts where `experts` is set; head,
    norms, attention and router stay in bf16."""

    recipe: Fp8Recipe = "current"
    """current: per-tensor scaling, E4M3, gradients of outputs in E5M2. delayed: the same with scales from
    the amax history of earlier steps, which saves a pass over each tensor. blockwise: one scale per 1x128 of
    inputs and gradients and per 128x128 of weights, E4M3. mxfp8: one scale per 32 numbers, E4M3."""
    experts: bool = False
    """Routed experts compute in fp8 too, except for their weight gradients. Recipes: current, with one scale
    per row of inputs and gradients and one per expert, all E4M3; blockwise."""
    bf16_layers_each_end: NonNegative = 1
    """Layers at each end of the model (first and last) that stay in bf16."""
    cast_weights: CastWeights = "per_microbatch"
    """per_microbatch: weights are cast to fp8 when they are used. per_step: they are cast once per update and
    cached, which is faster, takes two more bytes per weight, and needs unsharded weights on the device: not
    ZeRO-3, not offloaded. The numbers are the same."""
    history_steps: Positive = 16
    """delayed: length of the amax history in steps."""
    compare_every_steps: Positive | None = None
    """Every k steps one micro-batch runs in fp8 and in bf16 on the same weights and the gradients of each
    block are compared; None: never."""
    min_gradient_cosine: Fraction = 0.95
    """With compare_every_steps: a block whose gradients have a smaller cosine falls back to bf16 and stays
    there."""


def _of_recipe(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else value


class PrecisionSpec(Spec):
    """fp32 by default (fp64 when computing in fp64); `compute` is the dtype of matmuls."""

    compute: ComputeDtype = "fp32"
    """Dtype of matmuls and activations."""
    weights: WeightDtype = "fp32"
    """Dtype of the weights. bf16_exact: bf16, and the optimizer stores the lower 16 bits of the exact fp32
    values. bf16_stochastic: bf16 alone, with stochastic rounding so that small updates count on average. Both
    need compute=bf16."""
    gradients: GradientDtype = "fp32"
    """Dtype in which gradients are kept, accumulated over micro-batches and reduced over ranks; bf16 needs
    weights in bf16."""
    loss_scale: LossScaleSpec | None = None
    """Dynamic loss scaling; set exactly when compute is fp16."""
    fp8: Annotated[Fp8Spec | None, BeforeValidator(_of_recipe)] = None
    """fp8 matmuls in the linear layers of the blocks; the name of a recipe alone uses defaults for the rest.
    All other layers use `compute`, which is then bf16 (or fp64, for proofs)."""
