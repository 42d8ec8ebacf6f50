"""The documents of a token source as records, for packing and for looking at them."""

import numpy as np
from numpy.typing import NDArray

from meshwright.data.records import KEY, Record
from meshwright.data.sources import TokenSource


class TokenDocuments:
    """One record per document, with the field `tokens`."""

    def __init__(self, source: TokenSource) -> None:
        self.source, self.name = source, source.name

    @property
    def fingerprint(self) -> str:
        """That of the token source."""
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source.document_ends)

    def record(self, index: int) -> Record:
        """The tokens of one document, its end-of-document token included."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self.source.document_ends[index - 1]) if index else 0
        return {KEY: str(index), "tokens": self.source.tokens[start : int(self.source.document_ends[index])]}

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.source.document_ends, prepend=0)

    def require_unchanged(self) -> None:
        """DataError where the source was changed since it was opened."""
        self.source.require_unchanged()
