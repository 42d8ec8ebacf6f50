"""Random-access records: the interface between the readers of all formats and what is composed of them.

A record is a mapping of named fields, such as `{"__key__": "000017", "jpg": b"...", "txt": "a cat"}`.
A reader returns the record of any index without reading the records before it. So an order of records is a
permutation of integers, and a position in it is one integer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

KEY = "__key__"
"""The field that identifies a record within its source: the sample name in a tar, the id of a row."""

Field = bytes | str | int | float | np.ndarray
Record = Mapping[str, Field]


class RecordSource(Protocol):
    """Random-access records. Several threads may call `record` at once."""

    @property
    def name(self) -> str:
        """Name in messages: a path or an address."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that is equal exactly when the records and their order are equal."""
        ...

    def __len__(self) -> int:
        """Number of records."""
        ...

    def record(self, index: int) -> Record:
        """The record at `index`; RecordError where it is corrupt or missing."""
        ...

    def lengths(self) -> NDArray[np.int64] | None:
        """Tokens (or bytes) of each record, without reading the records; None where the format has none."""
        ...

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        ...


class RecordError(DataError):
    """A corrupt or missing record, named by its file, byte offset and key."""

    def __init__(
        self, fact: str, *, file: str, offset: int | None = None, key: str | None = None, hint: str = ""
    ) -> None:
        place = [file]
        place += [f"offset {offset}"] if offset is not None else []
        place += [f"key {key}"] if key is not None else []
        super().__init__(fact, where=", ".join(place), hint=hint)
        self.file, self.offset, self.key = file, offset, key

    def __reduce__(self) -> tuple[object, ...]:
        """Worker processes send errors to the main process, so they pickle with all parts."""
        return _rebuild, (self.fact, self.file, self.offset, self.key, self.hint)


def _rebuild(fact: str, file: str, offset: int | None, key: str | None, hint: str) -> RecordError:
    return RecordError(fact, file=file, offset=offset, key=key, hint=hint)


@dataclass(frozen=True)
class RecordsInMemory:
    """A record source in memory: small datasets, and tests."""

    name: str
    records: Sequence[Record]
    length_field: str | None = None
    """The field whose length `lengths` reports."""

    @property
    def fingerprint(self) -> str:
        """A hash of the content of all records."""
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        digest = hashlib.sha256()
        for record in self.records:
            for key, value in sorted(record.items()):
                content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
                digest.update(f"{key}:{type(value).__name__}:{len(content)}:".encode() + content)
            digest.update(b"\n")
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int) -> Record:
        """The record at `index`."""
        return self.records[index]

    def lengths(self) -> NDArray[np.int64] | None:
        """Length of the field `length_field` of each record."""
        if self.length_field is None:
            return None
        sizes = (len(record[self.length_field]) for record in self.records)  # pyright: ignore[reportArgumentType]
        return np.fromiter(sizes, dtype=np.int64, count=len(self.records))

    def require_unchanged(self) -> None:
        """Does nothing: nobody else can change memory."""
