"""The generated corpus: the same everywhere, readable, and true to its own facts."""

import hashlib
import re

import numpy as np
import pytest

from meshwright.data.corpus import document_text, generated_tokens, token_counts, unigram_entropy
from meshwright.data.tokenize import BYTE_EOS_ID, ByteTokenizer
from meshwright.spec import SyntheticSpec

NAMES = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
NUMBERS = {name: value for value, name in enumerate(NAMES)}


def replay(text: str) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
    """What is true at the end of a story, by reading it: fruits, treasure and trade of each name."""
    people = re.findall(r"(\w+) the (\w+) had a (\w+ \w+) and (\w+) \w+\.", text)
    fruits = {name: NUMBERS[number] for name, _, _, number in people}
    treasures = {name: treasure for name, _, treasure, _ in people}
    for giver, taker, number in re.findall(r"(\w+) gave (\w+) (\w+) \w+\.", text):
        fruits[giver] -= NUMBERS[number]
        fruits[taker] += NUMBERS[number]
    for number, finder in re.findall(r"There w\w+ (\w+) \w+ behind the \w+, and (\w+) found", text):
        fruits[finder] += NUMBERS[number]
    for one, other in re.findall(r"(\w+) gave (\w+) the ", text):
        treasures[one], treasures[other] = treasures[other], treasures[one]
    return fruits, treasures, {name: trade for name, trade, _, _ in people}


def test_the_corpus_never_changes() -> None:
    """A run that is resumed, or compared with another, must meet the text it knew."""
    text = "".join(document_text(0, index) for index in range(100))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "b71465e023d34c5d"


def test_a_document_is_made_alone() -> None:
    tokens = generated_tokens(SyntheticSpec(num_documents=5, seed=9))
    start, end = tokens.document_ends[2:4]
    assert ByteTokenizer().decode(tokens.tokens[start:end].tolist()) == document_text(9, 3)


def test_a_longer_corpus_begins_with_the_shorter_one() -> None:
    short = generated_tokens(SyntheticSpec(num_documents=3))
    long = generated_tokens(SyntheticSpec(num_documents=6))
    assert long.tokens[: len(short.tokens)].tolist() == short.tokens.tolist()
    assert long.fingerprint != short.fingerprint


def test_seeds_and_documents_differ() -> None:
    assert len({document_text(seed, index) for seed in range(5) for index in range(20)}) == 100


def test_every_document_ends_with_the_end_of_document() -> None:
    corpus = generated_tokens(SyntheticSpec(num_documents=50))
    assert np.flatnonzero(corpus.tokens == BYTE_EOS_ID).tolist() == (corpus.document_ends - 1).tolist()
    assert corpus.document_ends[-1] == len(corpus.tokens)


@pytest.mark.parametrize("index", range(40))
def test_stories_keep_their_own_facts(index: int) -> None:
    """Sums are right, brackets balance, the song comes back, and answers agree with the story."""
    text = document_text(1, index)
    for left, word, right, result in re.findall(r"(\w+) (and|less) (\w+) is (\w+),", text):
        sign = 1 if word == "and" else -1
        assert NUMBERS[left.lower()] + sign * NUMBERS[right] == NUMBERS[result]
    assert text.count("(") == text.count(")") > 0
    songs = re.findall(r'"(.*?)"', text)
    assert len(songs) == 2
    assert songs[0] == songs[1]
    fruits, treasures, trades = replay(text)
    treasure, owner = re.findall(r"Who had the (\w+ \w+) that night\? (\w+) the", text)[0]
    assert treasures[owner] == treasure
    who, count = re.findall(r"How many \w+ had (\w+)\? (\w+) ", text)[0]
    assert fruits[who] == NUMBERS["none" if count == "No" else count.lower()]
    trade, name = re.findall(r"And who was the (\w+)\? (\w+) was\.", text)[0]
    assert trades[name] == trade


def test_pronouns_agree() -> None:
    texts = [document_text(2, index) for index in range(200)]
    found = {match for text in texts for match in re.findall(r"(\w+) opened .*? hid (her|his) ", text)}
    assert len({name for name, _ in found}) == len(found) == 16


def test_entropy_of_equal_counts_is_the_logarithm() -> None:
    assert unigram_entropy(np.arange(8, dtype=np.uint8).repeat(5)) == pytest.approx(np.log(8))
    assert unigram_entropy(np.zeros(10, dtype=np.uint8)) == 0


def test_counts_do_not_depend_on_the_parts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, size=5000).astype(np.uint16)
    tokens[-1] = 1200  # a new largest token in the last part
    monkeypatch.setattr("meshwright.data.corpus.in_parts", lambda array: np.array_split(array, 7))
    assert token_counts(tokens).tolist() == np.bincount(tokens).tolist()


def test_context_helps_far_beyond_unigrams() -> None:
    """Sanity of the yardstick: even the last two bytes predict the next far better than frequencies do."""
    tokens = generated_tokens(SyntheticSpec(num_documents=200)).tokens.astype(np.int64)
    triples = unigram_entropy(tokens[:-2] * 257**2 + tokens[1:-1] * 257 + tokens[2:])
    pairs = unigram_entropy(tokens[:-2] * 257 + tokens[1:-1])
    assert triples - pairs < 0.5 * unigram_entropy(tokens)
