"""Records files: the sources of a loader in YAML, with joins, splits, weights, groups and workers."""

from typing import Literal

from pydantic import StrictBool

from meshwright.spec.base import NonNegative, Positive, PositiveNumber, Spec
from meshwright.spec.data import BlockShuffleSpec


class HashPartSpec(Spec):
    """One part of a source that is split by a hash, such as training and test records."""

    name: str
    """The part to read: a name in `shares`."""
    shares: dict[str, PositiveNumber]
    """Share of the records of each part; they add up to 1."""
    by: Literal["number", "key"] = "number"
    """What is hashed. number: the record's place, which reads nothing, and is stable where records are only
    added at the end; key: its key, which reads every record once, and is stable under any change."""
    seed: NonNegative = 0
    """Another seed assigns records differently."""


class RecordSourceSpec(Spec):
    """One source of records."""

    path: str
    """A file, folder or address of any format that `meshwright data inspect` opens."""
    split: str | None = None
    """A split that the dataset has itself (tar shards, Hugging Face datasets)."""
    join: tuple[str, ...] = ()
    """Further sources, whose fields are added to the records with the same key: captions to images."""
    missing: Literal["error", "skip"] = "error"
    """What happens to a record without a partner in every joined source."""
    part: HashPartSpec | None = None
    """Only one part of the records, chosen by a hash."""
    weight: PositiveNumber | None = None
    """Share of the samples, with any sum; either all sources have one or none. Without weights each source is
    read once per epoch."""


class RecordsSpec(Spec):
    """The records that `meshwright.open_loader` reads, as a file."""

    sources: tuple[RecordSourceSpec, ...]
    """What is read, blended by weights or one after the other in a common shuffle."""
    seed: NonNegative = 0
    """Seed of the order and of each sample's random numbers."""
    shuffle: StrictBool | BlockShuffleSpec = True
    """Shuffle with the seed, differently in each epoch; a mapping shuffles by blocks."""
    max_epochs: Positive | None = None
    """Epochs of each source before it ends; null repeats without end."""
    max_tokens: Positive | None = None
    """Group samples of similar lengths: each group has at most this many padded tokens (or bytes)."""
    num_workers: NonNegative | Literal["auto"] = 0
    """Workers that read ahead; auto reads a few samples at the start, chooses, and prints the choice."""
    workers: Literal["threads", "processes"] = "processes"
    """threads for decoders that release Python's lock, processes for the others."""
    prefetch: Positive = 2
    """Batches that each worker reads ahead."""
    max_bad_samples: NonNegative = 0
    """Corrupt records that are replaced and named; one more is an error."""
