"""Where samples come from and how they are batched."""

from typing import Literal

from meshwright.spec.base import NonNegative, Positive, Spec


class SyntheticSpec(Spec):
    """A corpus generated on the spot from a grammar with long-range structure; bytes are tokens."""

    num_documents: Positive = 2000
    """Documents generated."""
    seed: NonNegative = 0
    """The corpus depends on this alone."""


class DataSpec(Spec):
    """One token file, or the generated corpus; the order of samples depends only on the seed."""

    path: str | None = None
    """A packed dataset (`meshwright data pack`)."""
    synthetic: SyntheticSpec | None = None
    """Exactly one of `path` and `synthetic` is given."""
    sequence_length: Positive
    """Positions of one sequence."""
    batch_sequences: Positive
    """Global batch: sequences per optimizer step over all ranks."""
    microbatch_sequences: Positive = 1
    """Sequences of one forward pass on one data-parallel rank."""
    documents: Literal["separate", "joined"] = "separate"
    """separate: attention and positions restart at each document; joined: they run across."""
    shuffle: bool = True
    """Samples in an order drawn from the seed, anew each epoch; false reads them as they lie."""
    max_epochs: Positive | None = None
    """None: start over when the data is used up; otherwise the run ends there, with a short last batch."""
    holdout_sequences: NonNegative = 0
    """Sequences at the end of the data kept for evaluation, never trained on."""

    @property
    def batch_tokens(self) -> int:
        """Positions per optimizer step."""
        return self.batch_sequences * self.sequence_length
