"""Sequences from documents: targets, document ends, positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.samples import PADDING, Samples
from meshwright.data.sources import TokensInMemory

EOS = 99


def source_of(lengths: list[int]) -> TokensInMemory:
    """Documents of these lengths; token = place in the document, EOS at the end."""
    documents = [[*range(length - 1), EOS] for length in lengths]
    tokens = np.array([token for document in documents for token in document], dtype=np.uint8)
    return TokensInMemory("test", tokens, np.cumsum(lengths, dtype=np.int64), 100, "test")


def test_a_sample_is_a_window_and_its_successors() -> None:
    samples = Samples(source_of([4, 3, 6]), sequence_length=6, separate=True)
    rows = samples.rows(np.array([0, 1]))
    assert rows.tokens_BS.tolist() == [[0, 1, 2, EOS, 0, 1], [EOS, 0, 1, 2, 3, 4]]
    assert rows.targets_BS.tolist() == [[1, 2, EOS, 0, 1, EOS], [0, 1, 2, 3, 4, EOS]]
    assert rows.counts_BS.astype(int).tolist() == [[1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert rows.positions_BS.tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert rows.documents_BS is not None
    assert rows.documents_BS.tolist() == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]


def test_joined_documents_have_no_ends() -> None:
    rows = Samples(source_of([4, 3, 6]), sequence_length=6, separate=False).rows(np.array([0, 1]))
    assert rows.counts_BS.all()
    assert rows.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert rows.documents_BS is None


def test_padding_counts_nothing() -> None:
    samples = Samples(source_of([4, 3, 6]), sequence_length=6, separate=True)
    rows = samples.rows(np.array([PADDING, 1, PADDING]))
    assert rows.counts_BS.any(axis=1).tolist() == [False, True, False]
    assert samples.targets(np.array([PADDING, 1, PADDING])).count == 5


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    sequence_length=st.integers(1, 10),
    separate=st.booleans(),
)
def test_count_is_the_number_of_targets_that_count(
    lengths: list[int], sequence_length: int, separate: bool
) -> None:
    samples = Samples(source_of(lengths), sequence_length, separate)
    ids = np.arange(len(samples))[::-1].copy()
    assert samples.targets(ids).count == samples.rows(ids).counts_BS.sum()


@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=30), sequence_length=st.integers(2, 10))
def test_targets_stay_in_their_document(lengths: list[int], sequence_length: int) -> None:
    """By the definition, token by token: a target counts when it continues the document of its token."""
    samples = Samples(source_of(lengths), sequence_length, separate=True)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = samples.rows(np.arange(len(samples)))
    for sample in range(len(samples)):
        here = np.arange(sample * sequence_length, (sample + 1) * sequence_length)
        assert rows.counts_BS[sample].tolist() == (owner[here] == owner[here + 1]).tolist()
        assert rows.documents_BS is not None
        assert rows.documents_BS[sample].tolist() == (owner[here] - owner[here[0]]).tolist()
        expected = [
            place - np.flatnonzero(owner[here] == owner[here[place]])[0] for place in range(len(here))
        ]
        assert rows.positions_BS[sample].tolist() == expected


def test_the_end_of_document_is_learned_and_what_follows_it_is_not() -> None:
    rows = Samples(source_of([3] * 20), sequence_length=7, separate=True).rows(np.arange(8))
    ends = rows.tokens_BS == EOS
    assert not rows.counts_BS[ends].any()
    assert rows.counts_BS[rows.targets_BS == EOS].all()


def test_tokens_and_targets_cover_the_stream_once() -> None:
    source = source_of([5, 9, 2, 14])
    samples = Samples(source, sequence_length=4, separate=True)
    rows = samples.rows(np.arange(len(samples)))
    used = len(samples) * 4
    assert rows.tokens_BS.ravel().tolist() == source.tokens[:used].tolist()
    assert rows.targets_BS.ravel().tolist() == source.tokens[1 : used + 1].tolist()
    assert len(source.tokens) - used <= 4
