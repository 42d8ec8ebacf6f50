"""Where samples come from and how they are batched."""

from typing import Literal

from meshwright.spec.base import NonNegative, Positive, Spec


class SyntheticSpec(Spec):
    """A corpus generated on the spot from a grammar with long-range structure; bytes are tokens."""

    num_documents: Positive = 2000
    """Documents generated."""
    seed: NonNegative = 0
    """The corpus depends on this alone."""


class RampSpec(Spec):
    """A smaller (or larger) batch for the first steps."""

    before_step: Positive
    """For the steps before this one, counted from 0."""
    batch_sequences: Positive
    """Sequences per optimizer step over all ranks."""


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
    ramp: tuple[RampSpec, ...] = ()
    """Batches of the first steps, in order; `batch_sequences` from there on."""
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
        """Positions per optimizer step, after the ramp."""
        return self.batch_sequences * self.sequence_length

    def batch_sequences_of(self, batch_index: int) -> int:
        """Size of a batch by its number, counted from 0; a skipped step uses up its batch."""
        sizes = (part.batch_sequences for part in self.ramp if batch_index < part.before_step)
        return next(sizes, self.batch_sequences)

    def batch_tokens_of(self, batch_index: int) -> int:
        """Positions of a batch by its number."""
        return self.batch_sequences_of(batch_index) * self.sequence_length

    def batch_sequences_at(self, position: int) -> int:
        """Size of the batch that begins at a position, the number of samples before it."""
        begin, first_step = 0, 0
        for part in self.ramp:
            begin += (part.before_step - first_step) * part.batch_sequences
            first_step = part.before_step
            if position < begin:
                return part.batch_sequences
        return self.batch_sequences

    def num_sequences(self, num_batches: int) -> int:
        """Samples of the first batches together."""
        total, first_step = 0, 0
        for part in self.ramp:
            last_step = min(part.before_step, num_batches)
            total += (last_step - first_step) * part.batch_sequences
            first_step = last_step
        return total + (num_batches - first_step) * self.batch_sequences
