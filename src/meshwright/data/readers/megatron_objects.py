"""Megatron `.bin`/`.idx` pairs in an object store: the index is copied, documents are read by their range."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.data.file_check import sampled_content
from meshwright.data.readers.megatron import BIN_SUFFIX, IDX_SUFFIX, MegatronIndex
from meshwright.data.readers.object_store import StoreOptions
from meshwright.data.readers.places import RemotePlace
from meshwright.data.records import KEY, Record


class MegatronObjects:
    """The documents of a pair: a record source. Training on tokens needs the pair on a disk."""

    def __init__(self, place: RemotePlace, prefix: str) -> None:
        self.name, self._place, self._prefix = f"{place.name}/{prefix}", place, prefix
        self._tokens = place.open(prefix + BIN_SUFFIX)
        self._index = MegatronIndex(place.fetch(prefix + IDX_SUFFIX), self._tokens.num_bytes)

    @cached_property
    def _hash(self) -> str:
        return sampled_content(self._tokens.num_bytes, self._tokens.read_at)

    @property
    def fingerprint(self) -> str:
        """A hash of samples of both files, equal to that of a copy on a disk."""
        return self._index.fingerprint(self._hash)

    def __len__(self) -> int:
        """Number of documents with tokens."""
        return len(self._index.document_ends)

    def record(self, index: int) -> Record:
        """The document at `index`, as `tokens`."""
        ends, dtype = self._index.document_ends, self._index.dtype
        start, end = int(ends[index - 1]) if index else 0, int(ends[index])
        content = self._tokens.read_at(start * dtype.itemsize, (end - start) * dtype.itemsize)
        return {KEY: str(index), "tokens": np.frombuffer(content, dtype=dtype)}

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self._index.document_ends, prepend=0)

    def require_unchanged(self) -> None:
        """DataError where the object was replaced since it was opened."""
        self._tokens.require_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self._place.name, self._place.store.options, self._prefix)


def _reopened(address: str, options: StoreOptions, prefix: str) -> MegatronObjects:
    return MegatronObjects(RemotePlace(address, options), prefix)
