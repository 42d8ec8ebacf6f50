"""Record sources made of others: a join by key, a part, and a split by hash. Each is again random-access."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.records import KEY, Record, RecordError, RecordSource
from meshwright.errors import DataError


@dataclass(frozen=True)
class Subset:
    """Some records of a source, in a given order."""

    source: RecordSource
    indices: NDArray[np.int64]
    label: str
    """Name of this part, for messages."""

    @property
    def name(self) -> str:
        """Name of the source and of this part."""
        return f"{self.source.name} ({self.label})"

    @property
    def fingerprint(self) -> str:
        """A hash of the source's fingerprint and of the chosen indices."""
        digest = hashlib.sha256(self.source.fingerprint.encode() + self.indices.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.indices)

    def record(self, index: int) -> Record:
        """The record at `index` of this part."""
        return self.source.record(int(self.indices[index]))

    def lengths(self) -> NDArray[np.int64] | None:
        """Lengths of the chosen records."""
        lengths = self.source.lengths()
        return None if lengths is None else lengths[self.indices]

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        self.source.require_unchanged()


def keys_of(source: RecordSource) -> list[str]:
    """The key of every record; reads all records once. A record without a key has its number."""
    return [str(source.record(index).get(KEY, index)) for index in range(len(source))]


def split_by_hash(
    source: RecordSource, shares: Mapping[str, float], *, keys: Sequence[str] | None = None, seed: int = 0
) -> dict[str, Subset]:
    """Parts of a source by name, each record assigned by a hash of its key (or of its number).

    A record stays in its part when others are added or removed. `shares` add up to 1.
    """
    if abs(sum(shares.values()) - 1) > 1e-9:
        hint = "the shares of all parts add up to 1"
        raise DataError(f"shares add up to {sum(shares.values()):g}", where="split", hint=hint)
    texts = map(str, range(len(source))) if keys is None else keys
    hashed = (hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest() for text in texts)
    numbers = np.frombuffer(b"".join(hashed), dtype=np.uint64) / 2.0**64
    bounds = np.cumsum(list(shares.values()))[:-1]
    part = np.searchsorted(bounds, numbers, side="right")
    return {
        name: Subset(source, np.flatnonzero(part == number).astype(np.int64), name)
        for number, name in enumerate(shares)
    }


class JoinedRecords:
    """Records of several sources with the same key, merged: images of one source, captions of another.

    The order is that of the first source. Fields of later sources are added; a field that is in two sources
    is an error. `missing` says what happens to a record without a partner: error, or skip.
    """

    def __init__(
        self,
        sources: Sequence[RecordSource],
        *,
        missing: Literal["error", "skip"] = "error",
        keys: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """`keys` has the keys of every source, where they are known; otherwise all records are read once."""
        self.sources = tuple(sources)
        found = [keys_of(source) for source in sources] if keys is None else keys
        places = [_places(source, each) for source, each in zip(sources, found, strict=True)]
        chosen = [key for key in found[0] if all(key in each for each in places[1:])]
        if missing == "error" and len(chosen) < len(found[0]):
            self._raise_missing(found[0], places)
        if not chosen:
            raise DataError("no key is in all sources", where=self.name, hint="check the keys of the records")
        self._indices = np.array([[each[key] for each in places] for key in chosen], dtype=np.int64)

    @property
    def name(self) -> str:
        """Names of all sources."""
        return " + ".join(source.name for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """A hash of all fingerprints and of the pairs."""
        digest = hashlib.sha256("".join(source.fingerprint for source in self.sources).encode())
        digest.update(self._indices.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._indices)

    def record(self, index: int) -> Record:
        """The fields of all records with the key at `index`."""
        merged: dict[str, object] = {}
        for source, place in zip(self.sources, self._indices[index].tolist(), strict=True):
            fields = source.record(place)
            if twice := (merged.keys() & fields.keys()) - {KEY}:
                fact = f"field {sorted(twice)[0]!r} is in two sources of the join"
                raise RecordError(fact, file=source.name, key=str(fields.get(KEY)))
            merged |= fields
        return merged  # pyright: ignore[reportReturnType]

    def lengths(self) -> NDArray[np.int64] | None:
        """Lengths of the records of the first source that has lengths."""
        for source, places in zip(self.sources, self._indices.T, strict=True):
            lengths = source.lengths()
            if lengths is not None:
                return lengths[places]
        return None

    def require_unchanged(self) -> None:
        """DataError where a source was changed since it was opened."""
        for source in self.sources:
            source.require_unchanged()

    def _raise_missing(self, keys: Sequence[str], places: list[dict[str, int]]) -> None:
        for source, each in zip(self.sources[1:], places[1:], strict=True):
            for key in keys:
                if key not in each:
                    hint = "use missing='skip' to leave such records out"
                    raise RecordError(
                        "there is no record with this key", file=source.name, key=key, hint=hint
                    )


def _places(source: RecordSource, keys: Sequence[str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for index, key in enumerate(keys):
        if places.setdefault(key, index) != index:
            raise RecordError("two records have this key", file=source.name, key=key)
    return places
