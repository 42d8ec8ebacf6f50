"""Offsets of documents, one padded row for each micro-batch."""

import numpy as np

from meshwright.data.document_offsets import ALIGN, batch_documents, document_offsets

IDS = np.array([[0, 0, 1, 2], [0, 0, 0, 0], [4, 5, 6, 7], [9, 9, 9, 1]])


def test_every_sequence_begins_a_document() -> None:
    assert document_offsets(IDS[:2]).tolist() == [0, 2, 3, 4, 8]
    assert document_offsets(np.zeros((3, 5), dtype=np.int64)).tolist() == [0, 5, 10, 15]


def test_micro_batches_count_from_zero_and_have_one_length() -> None:
    found = batch_documents(IDS, 2)
    assert found.offsets_MP.shape == (2, ALIGN) and found.offsets_MP.dtype == np.int32
    assert found.offsets_MP[0].tolist() == [0, 2, 3, 4] + [8] * (ALIGN - 4)
    assert found.offsets_MP[1].tolist() == [0, 1, 2, 3, 4, 7] + [8] * (ALIGN - 6)
    assert found.longest_M == (4, 3)


def test_many_documents_take_the_next_multiple() -> None:
    assert batch_documents(np.arange(40)[None], 1).offsets_MP.shape == (1, 3 * ALIGN)
