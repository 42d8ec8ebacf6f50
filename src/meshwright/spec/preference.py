"""Training on pairs of answers, of which one is preferred (DPO and its relatives)."""

from typing import Literal

from meshwright.spec.base import Fraction, NonNegativeNumber, PositiveNumber, Spec


class PreferenceSpec(Spec):
    """The loss of a pair of answers. S is the sum of the log-probs of an answer, R that of the reference, and
    n its tokens. The reference is the model at the start of the run; its log-probs are computed once."""

    loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
    """sigmoid: DPO, -log sigmoid(beta ((S - R) of chosen - (S - R) of rejected)); ipo: the squared distance
    of the difference of (S - R) / n from 1 / (2 beta); simpo: -log sigmoid(beta (S / n of chosen - S / n of
    rejected) - margin), without a reference; orpo: the NLL of chosen and beta times the odds-ratio loss,
    without a reference."""
    beta: PositiveNumber = 0.1
    """How strongly the reference binds; usual are 0.1 for sigmoid, ipo and orpo, and 2 for simpo."""
    label_smoothing: Fraction = 0.0
    """sigmoid: the probability that a label is wrong (conservative DPO); below 0.5."""
    margin: NonNegativeNumber = 0.0
    """simpo: the reward margin (gamma) that a pair should reach."""
    nll_weight: NonNegativeNumber = 0.0
    """Weight of the NLL per token of the chosen answer, which is added to the loss of the pair."""
    reference: Literal["start", "dataset"] = "start"
    """start: the run computes the reference log-probs before its first step; dataset: it reads those that
    `meshwright data logprobs` stored with the dataset, and refuses those of other weights."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model at the start of the run."""
        return self.loss in ("sigmoid", "ipo")
