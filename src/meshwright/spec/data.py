"""The dataset of a run and how its samples are batched."""

from typing import Literal

from meshwright.spec.base import NonNegative, Positive, Spec


class SyntheticSpec(Spec):
    """A corpus generated at start from a grammar with long-range structure; each byte is a token."""

    num_documents: Positive = 2000
    """Number of generated documents."""
    seed: NonNegative = 0
    """Seed of the corpus, which depends on nothing else."""


class BatchRampSpec(Spec):
    """A smaller (or larger) global batch for the first steps (batch-size warm-up)."""

    before_step: Positive
    """This batch size holds for the steps before this one, counted from 0."""
    batch_sequences: Positive
    """Sequences per optimizer step over all ranks."""


class DataSpec(Spec):
    """One packed dataset, or the generated corpus; the order of samples depends only on the seed."""

    path: str | None = None
    """Folder of a packed dataset (`meshwright data pack`)."""
    synthetic: SyntheticSpec | None = None
    """The generated corpus; exactly one of `path` and `synthetic` is set."""
    sequence_length: Positive
    """Tokens of one sequence."""
    batch_sequences: Positive
    """Global batch: sequences per optimizer step over all ranks."""
    batch_ramp: tuple[BatchRampSpec, ...] = ()
    """Batch sizes of the first steps, in order; `batch_sequences` after them."""
    microbatch_sequences: Positive = 1
    """Sequences of one forward pass on one data-parallel rank."""
    documents: Literal["separate", "joined"] = "separate"
    """separate: document masking (varlen attention), attention and positions restart at each document;
    joined: they run across documents."""
    shuffle: bool = True
    """Shuffle samples with the seed, differently in each epoch; false reads them in the order of the file."""
    max_epochs: Positive | None = None
    """The run ends after this many epochs, with a short last batch; null repeats the data without end."""
    holdout_sequences: NonNegative = 0
    """Sequences at the end of the data that are kept for evaluation and never trained on."""

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step, after the ramp."""
        return self.batch_sequences * self.sequence_length

    def batch_sequences_of(self, batch_index: int) -> int:
        """Size of a batch by its index, counted from 0; a skipped step uses up its batch."""
        sizes = (part.batch_sequences for part in self.batch_ramp if batch_index < part.before_step)
        return next(sizes, self.batch_sequences)

    def batch_tokens_of(self, batch_index: int) -> int:
        """Tokens of a batch by its index."""
        return self.batch_sequences_of(batch_index) * self.sequence_length

    def num_sequences(self, num_batches: int) -> int:
        """Sequences of the first batches together."""
        total, first_step = 0, 0
        for part in self.batch_ramp:
            last_step = min(part.before_step, num_batches)
            total += (last_step - first_step) * part.batch_sequences
            first_step = last_step
        return total + (num_batches - first_step) * self.batch_sequences
