"""The dataset of a run and how its samples are batched."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool

from meshwright.spec.base import LARGEST_COUNT, NonNegative, NonNegativeNumber, Positive, PositiveNumber, Spec
from meshwright.units import parse_bytes, parse_number

MAX_BLEND_PERIOD = 10**6
"""Samples after which the weights of a blend must repeat: weights of six digits do."""


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


class BlendPartSpec(Spec):
    """One dataset of a blend."""

    path: str | None = None
    """Folder of a packed dataset."""
    synthetic: SyntheticSpec | None = None
    """The generated corpus; exactly one of `path` and `synthetic` is set."""
    weight: PositiveNumber
    """Share of the samples; the weights of a blend may have any sum. Shares are exact at every step: each
    dataset is less than one sample away from its share of all samples before."""
    repeat: StrictBool | Positive = True
    """true: the dataset starts over in a new order when it is used up; false: it ends, and the others go on
    in their proportions; a number: it ends after this many epochs."""

    @property
    def max_epochs(self) -> int | None:
        """Epochs before this dataset ends; None: it repeats without end."""
        if isinstance(self.repeat, bool):
            return None if self.repeat else 1
        return self.repeat


class HoldoutSpec(Spec):
    """A share of the data that is kept for evaluation, chosen by a hash (train / validation split)."""

    share: Annotated[float, Field(gt=0, lt=1), BeforeValidator(parse_number)]
    """Share of the documents of each dataset; with packing=cut, of its sequences."""
    by: Literal["number", "content"] = "number"
    """What is hashed. number: the place in the dataset, which reads nothing and is stable where documents are
    only added at the end; content: the tokens, which reads the dataset once at each start, is stable under
    any change of other documents, and keeps copies of one document on one side."""
    seed: NonNegative = 0
    """Another seed chooses others."""


class CurriculumSpec(Spec):
    """Other weights of the blend for the first steps."""

    before_step: Positive
    """These weights hold for the steps before this one, counted from 0."""
    weights: tuple[NonNegativeNumber, ...]
    """A weight for each dataset of the blend, in their order; 0 leaves one out."""


class BlockShuffleSpec(Spec):
    """A shuffle that reads neighbouring samples together, for slow storage: blocks of samples are shuffled,
    then the samples of each window of blocks. The quality is in docs/guides/data.md."""

    block_samples: Positive = 1024
    """Samples of one block, which lie next to each other in the dataset."""
    window_blocks: Positive = 64
    """Blocks whose samples are shuffled together."""


class DataSpec(Spec):
    """The datasets of a run; the order of samples depends only on the seed."""

    path: str | None = None
    """Folder of a packed dataset (`meshwright data pack`), or the prefix of a Megatron .bin/.idx pair."""
    synthetic: SyntheticSpec | None = None
    """The generated corpus; exactly one of `path`, `synthetic` and `blend` is set."""
    blend: tuple[BlendPartSpec, ...] = ()
    """Several datasets with weights, read as one."""
    curriculum: tuple[CurriculumSpec, ...] = ()
    """Weights of the blend for the first steps, in order; those of `blend` after them."""
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
    packing: Literal["cut", "whole"] = "cut"
    """How documents become sequences. cut: they are concatenated and cut at every sequence_length tokens;
    whole: each sequence has complete documents (best-fit packing), planned on their lengths."""
    shuffle: StrictBool | BlockShuffleSpec = True
    """Shuffle samples with the seed, differently in each epoch; false reads them in the order of the file; a
    mapping of block_samples and window_blocks shuffles by blocks."""
    max_epochs: Positive | None = None
    """The run ends after this many epochs, with a short last batch; null repeats the data without end."""
    holdout_sequences: NonNegative = 0
    """Sequences at the end of the data that are kept for evaluation and never trained on; of a blend, at the
    end of each dataset, in proportion to the weights."""
    holdout: HoldoutSpec | None = None
    """A share that is kept for evaluation instead, chosen by a hash."""
    on_device_bytes: Annotated[int, Field(ge=0, le=LARGEST_COUNT), BeforeValidator(parse_bytes)] = 0
    """Device memory for the data: all sequences are copied to every device at the start, and batches are
    gathered there; for small datasets. Refused where they take more. 0: batches are read ahead and copied."""
    max_bad_samples: NonNegative = 0
    """Corrupt samples that a rank replaces, each by another sample that follows from its id, and names; one
    more ends the run. 0: the first one ends the run."""

    @property
    def sources(self) -> tuple[BlendPartSpec, ...]:
        """Every dataset: those of the blend, or the only one."""
        return self.blend or (BlendPartSpec(path=self.path, synthetic=self.synthetic, weight=1.0),)

    @property
    def has_holdout(self) -> bool:
        """Whether some sequences are kept for evaluation."""
        return self.holdout_sequences > 0 or self.holdout is not None

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


def exact_shares(weights: Sequence[float]) -> list[int]:
    """Weights, read as decimals, as whole numbers without a common divisor: 0.7 and 0.3 are 7 and 3."""
    exact = [Fraction(str(one)) for one in weights]
    total = sum(exact)
    period = math.lcm(*((one / total).denominator for one in exact))
    return [int(one / total * period) for one in exact]
