"""Offsets of the documents of each micro-batch, which attention reads (separate documents, varlen)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ALIGN = 16
"""Offsets are padded to a multiple of this many, so that few sizes occur; a kernel skips empty documents."""


class BatchDocuments(NamedTuple):
    """The documents of M micro-batches."""

    offsets_MP: NDArray[np.int32]
    """Offsets over the tokens of each micro-batch, padded to one length with its number of tokens."""
    longest_M: tuple[int, ...]
    """Tokens of the longest document of each micro-batch."""


def batch_documents(documents_BS: NDArray[np.integer], microbatch_sequences: int) -> BatchDocuments:
    """The documents of a batch that is split into micro-batches of this many sequences."""
    parts = np.split(documents_BS, len(documents_BS) // microbatch_sequences)
    offsets = [document_offsets(part) for part in parts]
    most = max(len(each) for each in offsets)
    width = most + -most % ALIGN
    padded = [np.pad(each, (0, width - len(each)), mode="edge") for each in offsets]
    return BatchDocuments(np.stack(padded), tuple(int(np.diff(each).max()) for each in offsets))


def document_offsets(documents_BS: NDArray[np.integer]) -> NDArray[np.int32]:
    """The first token of each document, counted over all sequences, and the number of tokens at the end.

    A document begins at the start of a sequence and wherever the id changes.
    """
    begins_BS = np.ones(documents_BS.shape, dtype=np.bool_)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return np.append(np.flatnonzero(begins_BS), documents_BS.size).astype(np.int32)
