"""Numbers about a dataset, against counting by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.describe import describe_lengths, describe_packing, describe_unigrams, histogram
from meshwright.data.pack import TextFormat, pack
from meshwright.data.sources import TokenFile
from meshwright.data.tokenize import ByteTokenizer


@pytest.fixture
def dataset(tmp_path: Path) -> TokenFile:
    """Documents of 4, 10, 5 and 1 characters and an end each: 5, 11, 6 and 2 tokens."""
    (tmp_path / "a.txt").write_text("\n\n".join(["abc", "aaabbbccc", "abcd", "a"]))
    text_format = TextFormat(split="blank-line")
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer(), text_format=text_format)
    return TokenFile.open(tmp_path / "data")


@given(st.lists(st.integers(1, 100_000), min_size=1))
def test_every_document_is_in_one_bar(lengths: list[int]) -> None:
    bars = histogram(np.array(lengths))
    for bar in bars:
        assert bar.num_documents == sum(bar.at_least <= length < bar.below for length in lengths)
    assert sum(bar.num_documents for bar in bars) == len(lengths)
    assert len(bars) <= 18
    assert all(before.below == after.at_least for before, after in itertools.pairwise(bars))


def test_lengths_alike_are_drawn_in_even_steps() -> None:
    bars = histogram(np.array([800, 900, 1400]))
    assert {bar.below - bar.at_least for bar in bars} == {100}


def test_five_numbers_of_lengths() -> None:
    lengths = describe_lengths(np.array([5, 11, 6, 2]))
    assert (lengths.shortest, lengths.median, lengths.mean, lengths.longest) == (2, 5.5, 6, 11)


def test_unigrams_are_counted(dataset: TokenFile) -> None:
    unigrams = describe_unigrams(dataset, num_most=2)
    assert unigrams.num_distinct == 6  # a, b, c, d, newline, end
    assert unigrams.most_frequent == [(ord("a"), 6), (ord("b"), 5)]


def test_packing_is_counted(dataset: TokenFile) -> None:
    packing = describe_packing(dataset, 6)
    assert packing.num_sequences == 3
    assert packing.unused_tokens == 24 - 18
    assert packing.documents_per_sequence == pytest.approx(4 / 3)
    # Of the 18 targets, those at the ends of the documents at 5 and 16 belong to another document.
    assert packing.target_share == pytest.approx(16 / 18)
    # [0, 5) is in one sequence of six; [5, 16) and [16, 22) are split; [22, 24) is in one.
    assert packing.split_share == 0.5
    # One document per row: 1, 2, 1 and 1 rows of 6.
    assert packing.padded_share == pytest.approx(24 / 30)
