"""The update rule."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from meshwright.spec.base import Fraction, Number, Positive, PositiveNumber, Spec


class LrScalingSpec(Spec):
    """Raises the learning rate with the batch: lr x (batch / reference) or its square root."""

    rule: Literal["linear", "sqrt"]
    """Raise the rate in proportion to the batch, or to its square root."""
    reference_batch_tokens: Positive
    """The batch at which `optim.lr` is right as written."""


class GroupSpec(Spec):
    """Parameters that move at another rate or decay otherwise, by their names."""

    pattern: str
    """Shell pattern over whole parameter names, such as `*norm*` or `blocks.0.*`."""
    lr_factor: PositiveNumber = 1.0
    """Times the rate of every step."""
    weight_decay: Number | None = None
    """For all parameters of the group, vectors too; absent: as without the group."""


class OptimSpec(Spec):
    """AdamW by default; decay falls on matrices only unless told otherwise."""

    kind: Literal["adamw", "sgd", "adamw_8bit", "adafactor", "lars", "lamb", "muon"] = "adamw"
    """adamw, sgd with momentum, and what needs less memory (adamw_8bit, adafactor), bears larger batches
    (lars, lamb: steps in proportion to each parameter's norm) or turns gradients into rotations (muon:
    matrices; embeddings, head and vectors go by adamw)."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """First moment; sgd and lars: momentum; adafactor: 0 keeps no first moment; muon: of its adamw part."""
    beta2: Fraction = 0.95
    """Second moment."""
    eps: PositiveNumber = 1e-8
    """Added to the root of the second moment."""
    state: Literal["fp32", "bf16"] = "fp32"
    """adamw: format of the two moments; bf16 ones are rounded at random, right on average."""
    momentum: Fraction = 0.95
    """muon: of matrices."""
    trust: PositiveNumber = 1e-3
    """lars: the part of its norm by which a parameter moves at a rate of 1."""
    weight_decay: Number = 0.1
    """Decoupled from the gradient and multiplied by the rate; sgd, lars and lamb: part of what they step
    along."""
    decay: Literal["matrices", "all"] = "matrices"
    """matrices: no decay on norms, biases and other vectors."""
    groups: tuple[GroupSpec, ...] = ()
    """Exceptions by parameter name; where several match, the last one counts."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are scaled down to this global norm; null never clips."""
    lr_scaling: LrScalingSpec | None = None
    """None: the rate is used as written, whatever the batch."""
    ema_decay: Fraction | None = None
    """Exponential moving average of the weights, updated after each step that was not skipped."""

    @property
    def keeps_nothing(self) -> bool:
        """No state of the size of the parameters: without a first moment these have none."""
        return self.kind in ("sgd", "lars", "adafactor") and self.beta1 == 0


def group_of(name: str, groups: Sequence[GroupSpec]) -> int | None:
    """Index of the last group whose pattern matches a parameter's name."""
    matches = [index for index, group in enumerate(groups) if fnmatchcase(name, group.pattern)]
    return matches[-1] if matches else None
