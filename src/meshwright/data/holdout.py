"""Held-out documents or sequences, chosen by a hash: each one's part does not depend on the others."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshwright.data.order import scramble
from meshwright.data.samples import PADDING, Rows, Samples, Targets
from meshwright.data.sources import TokenSource
from meshwright.errors import DataError
from meshwright.spec.data import HoldoutSpec

_CHUNK = 1 << 22


def held_out_documents(source: TokenSource, spec: HoldoutSpec) -> NDArray[np.bool_]:
    """True for each document of a source that is held out."""
    ends = source.document_ends
    if spec.by == "number":
        return _both_parts(_chosen_numbers(len(ends), spec), source, spec)
    starts = np.concatenate([[0], ends[:-1]]).tolist()
    texts = (source.tokens[start:end].tobytes() for start, end in zip(starts, ends.tolist(), strict=True))
    return _both_parts(_chosen_contents(texts, spec), source, spec)


def held_out_sequences(samples: Samples, spec: HoldoutSpec) -> NDArray[np.bool_]:
    """True for each sequence of a source that is held out."""
    source, length = samples.source, samples.sequence_length
    if spec.by == "number":
        return _both_parts(_chosen_numbers(len(samples), spec), source, spec)
    texts = (source.tokens[one * length : (one + 1) * length].tobytes() for one in range(len(samples)))
    return _both_parts(_chosen_contents(texts, spec), source, spec)


def _chosen_numbers(count: int, spec: HoldoutSpec) -> NDArray[np.bool_]:
    key = np.random.SeedSequence([spec.seed, 0x686F6C64]).generate_state(1, np.uint64)[0]
    parts = [
        scramble(scramble(np.arange(start, min(start + _CHUNK, count), dtype=np.uint64) ^ key) + key)
        < np.uint64(spec.share * 2.0**64)
        for start in range(0, count, _CHUNK)
    ]
    return np.concatenate(parts)


def _chosen_contents(texts: Iterable[bytes], spec: HoldoutSpec) -> NDArray[np.bool_]:
    salt = spec.seed.to_bytes(8, "little")
    hashes = b"".join(hashlib.blake2b(text, digest_size=8, salt=salt).digest() for text in texts)
    return np.frombuffer(hashes, dtype="<u8") < np.uint64(spec.share * 2.0**64)


def _both_parts(chosen: NDArray[np.bool_], source: TokenSource, spec: HoldoutSpec) -> NDArray[np.bool_]:
    if chosen.all() or not chosen.any():
        part = "training" if chosen.all() else "evaluation"
        raise DataError(
            f"holdout share={spec.share:g} of {len(chosen):,} leaves nothing for {part}",
            where=source.name,
            hint="use another share or seed, or data.holdout_sequences",
        )
    return chosen


class ReorderedSamples:
    """The samples of a source with those that are held out at the end.

    Only the ids of held-out samples are in memory: they are the smaller part.
    """

    def __init__(self, samples: Samples, is_held_out: NDArray[np.bool_]) -> None:
        self._samples = samples
        self.sequence_length, self.separate = samples.sequence_length, samples.separate
        self._held_out = np.flatnonzero(is_held_out)
        # Training samples before each held-out one.
        self._before = self._held_out - np.arange(len(self._held_out))

    @property
    def num_training(self) -> int:
        """Samples that are not held out."""
        return len(self._samples) - len(self._held_out)

    @property
    def name(self) -> str:
        """Name of the source."""
        return self._samples.name

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the source."""
        return self._samples.vocab_size

    def __len__(self) -> int:
        return len(self._samples)

    def targets(self, ids: NDArray[np.int64]) -> Targets:
        """The targets of these samples together."""
        return self._samples.targets(self._original(ids))

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """The samples of these ids, in their order; PADDING is a row in which no target counts."""
        return self._samples.rows(self._original(ids))

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        self._samples.require_unchanged()

    def _original(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of these samples in the source."""
        training = ids + np.searchsorted(self._before, ids, side="right")
        held_out = self._held_out[np.clip(ids - self.num_training, 0, None)]
        return np.where(ids == PADDING, PADDING, np.where(ids < self.num_training, training, held_out))
