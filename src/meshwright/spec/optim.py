"""The update rule."""

from typing import Literal

from meshwright.spec.base import Fraction, Number, Positive, PositiveNumber, Spec


class LrScalingSpec(Spec):
    """Raises the learning rate with the batch: lr x (batch / reference) or its square root."""

    rule: Literal["linear", "sqrt"]
    """Raise the rate in proportion to the batch, or to its square root."""
    reference_batch_tokens: Positive
    """The batch at which `optim.lr` is right as written."""


class OptimSpec(Spec):
    """AdamW by default; decay falls on matrices only unless told otherwise."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """adamw: first moment; sgd: momentum."""
    beta2: Fraction = 0.95
    """adamw: second moment."""
    eps: PositiveNumber = 1e-8
    """adamw: added to the root of the second moment."""
    weight_decay: Number = 0.1
    """Decoupled from the gradient; multiplied by the rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: no decay on norms, biases and other vectors."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are scaled down to this global norm; null never clips."""
    lr_scaling: LrScalingSpec | None = None
    """None: the rate is used as written, whatever the batch."""
    ema_decay: Fraction | None = None
    """Exponential moving average of the weights, updated after each step that was not skipped."""
