"""The optimizer."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from meshwright.spec.base import Fraction, Number, Positive, PositiveNumber, Spec

OptimizerKind = Literal["adamw", "sgd", "adamw_8bit", "adafactor", "lars", "lamb", "muon"]
StateDtype = Literal["fp32", "bf16"]
DecayedParameters = Literal["matrices", "all"]
LrScalingRule = Literal["linear", "sqrt"]


class LrScalingSpec(Spec):
    """Scales the learning rate with the batch: lr x (batch / reference), or its square root."""

    rule: LrScalingRule
    """Scale the learning rate in proportion to the batch, or to its square root."""
    reference_batch_tokens: Positive
    """The batch at which `optim.lr` is used unscaled."""


class GroupSpec(Spec):
    """A parameter group: parameters, by name, with another learning rate or weight decay."""

    pattern: str
    """Shell pattern over full parameter names, such as `*norm*` or `blocks.0.*`."""
    lr_factor: PositiveNumber = 1.0
    """Factor on the learning rate of every step."""
    weight_decay: Number | None = None
    """Weight decay of all parameters of the group, vectors too; absent: as without the group."""


class OptimSpec(Spec):
    """AdamW by default, with weight decay on matrices only."""

    kind: OptimizerKind = "adamw"
    """adamw; sgd with momentum; adamw_8bit and adafactor need less memory; lars and lamb, whose updates are
    in proportion to each parameter's norm, allow larger batches; muon orthogonalises the updates of matrices
    and uses adamw for embeddings, head and vectors."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay of the first moment; sgd and lars: momentum; adafactor: 0 has no first moment; muon: of its adamw
    part."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveNumber = 1e-8
    """Added to the square root of the second moment."""
    state: StateDtype = "fp32"
    """adamw: dtype of the two moments; bf16 uses stochastic rounding."""
    momentum: Fraction = 0.95
    """muon: momentum of matrices."""
    trust_coefficient: PositiveNumber = 1e-3
    """lars: norm of an update / norm of its parameter, at a learning rate of 1."""
    weight_decay: Number = 0.1
    """Decoupled weight decay, times the learning rate; sgd, lars and lamb add it to the update direction."""
    weight_decay_on: DecayedParameters = "matrices"
    """Parameters with weight decay; matrices: not on norms, biases and other vectors."""
    groups: tuple[GroupSpec, ...] = ()
    """Parameter groups by name; where several match a parameter, the last one applies."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are clipped to this global norm; null does not clip."""
    lr_scaling: LrScalingSpec | None = None
    """Scaling of the learning rate with the batch; null uses `lr` for any batch."""
    ema_decay: Fraction | None = None
    """Exponential moving average of the weights, updated after each step that was not skipped."""

    @property
    def is_stateless(self) -> bool:
        """Whether there is no state of the size of the parameters: so it is without a first moment."""
        return self.kind in ("sgd", "lars", "adafactor") and self.beta1 == 0


def group_of(name: str, groups: Sequence[GroupSpec]) -> int | None:
    """Index of the last group whose pattern matches a parameter's name."""
    matches = [index for index, group in enumerate(groups) if fnmatchcase(name, group.pattern)]
    return matches[-1] if matches else None
