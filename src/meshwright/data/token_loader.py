"""A loader of token sequences for any training loop: the order and position of a run's data, tensors out."""

import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from meshwright.data.microbatch import BatchSharding
from meshwright.data.order import OrderCache
from meshwright.data.samples import Samples
from meshwright.data.stream import open_stream
from meshwright.data.stream_position import require_same_stream
from meshwright.spec import DataSpec

_ANY_VOCABULARY = 2**31
_CHECK_SECONDS = 0.01


class TokenLoader:
    """Sequences of S + 1 tokens as int64: inputs are [:, :-1], targets are [:, 1:].

    Positions, documents and loss weights come with `meshwright.data.batches.build_batches`.
    """

    def __init__(self, spec: DataSpec, *, seed: int = 0, dp_rank: int = 0, dp_size: int = 1) -> None:
        self.stream = open_stream(spec, seed=seed, vocab_size=_ANY_VOCABULARY)
        self.position = 0
        """Sequences of all batches that were returned, over all ranks."""
        size = spec.batch_sequences // dp_size
        self._sharding = BatchSharding(
            spec.batch_sequences, size or 1, dp_rank, dp_size, torch.device("cpu"), torch.float32
        )
        self._ids, self._checked_at = OrderCache(self.stream.order), float("-inf")
        samples = self.stream.samples
        self._windows = samples.windows if isinstance(samples, Samples) else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        """This rank's sequences of the batch at `position`; padding rows of a short last batch are 0."""
        count, end = self._sharding.batch_sequences, self.stream.num_samples
        count = count if end is None else min(count, end - self.position)
        if count <= 0:
            raise StopIteration
        self._require_unchanged()
        ids = self._ids.sample_ids(self.position, count)
        is_full = count == self._sharding.batch_sequences
        if self._sharding.dp_size > 1 or not is_full:
            ids = self._sharding.local(ids)
        if self._windows is not None and is_full:
            window = self._windows[ids]
        else:
            window = self.stream.samples.rows(ids).window_BW
        self.position += count
        return torch.from_numpy(window.astype(np.int64))

    def _require_unchanged(self) -> None:
        """DataError where a file was changed; looks at most every few milliseconds."""
        now = time.monotonic()
        if now - self._checked_at > _CHECK_SECONDS:
            self.stream.samples.require_unchanged()
            self._checked_at = now

    def state(self) -> dict[str, Any]:
        """The position and the stream that it counts in, as JSON."""
        return {"position": self.position, "stream": self.stream.number, "facts": dict(self.stream.facts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; DataError with the reason where it counts in another stream."""
        stream = self.stream
        require_same_stream(state, facts=stream.facts, number=stream.number, where=stream.samples.name)
        self.position = int(state["position"])
