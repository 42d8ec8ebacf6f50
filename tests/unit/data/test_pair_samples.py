"""Pairs stay together: both answers in one row, each a document of its own."""

import numpy as np
import pytest

from meshwright.data.pair_samples import NO_PAIR, PairSamples, plan_pairs
from meshwright.data.samples import PADDING
from meshwright.data.sources import TokensInMemory
from meshwright.errors import DataError

SIZE = 16


def samples(num_pairs: int = 50) -> PairSamples:
    lengths = np.random.default_rng(0).integers(2, 9, 2 * num_pairs)
    ends = np.cumsum(lengths)
    tokens = np.repeat(np.arange(2 * num_pairs), lengths).astype(np.uint8)  # a token names its document
    weights = np.ones(len(tokens), dtype=np.float16)
    return PairSamples.open(TokensInMemory("pairs", tokens, ends, 200, "x", weights), SIZE)


def test_every_pair_is_in_one_row_once():
    found = samples()
    ids = found.pair_ids(np.arange(len(found)))
    assert sorted(ids[ids != NO_PAIR].tolist()) == list(range(50))


def test_answers_name_the_documents_of_the_pair():
    found = samples()
    ids = np.array([3, PADDING, 0, 7])
    rows = found.rows(ids)
    pairs = found.row_pairs(rows, ids, ids)
    pair_ids = found.pair_ids(ids)
    for row in range(len(ids)):
        for place in np.flatnonzero(rows.counts_BS[row]):
            answer = int(pairs.answers_BS[row, place])
            document = 2 * pair_ids[row, answer // 2] + answer % 2
            assert rows.tokens_BS[row, place] == rows.targets_BS[row, place] == document
    assert not rows.counts_BS[1].any()


def test_weights_divide_by_the_pairs_of_the_batch_and_references_follow_their_pairs():
    found = samples()
    found.reference = np.arange(100, dtype=np.float64).reshape(50, 2)
    ids, all_ids = np.array([2, 5]), np.arange(8)
    pairs = found.row_pairs(found.rows(ids), ids, all_ids).pairs_BPF
    total = int((found.pair_ids(all_ids) != NO_PAIR).sum())
    pair_ids = found.pair_ids(ids)
    is_pair = pair_ids != NO_PAIR
    assert pairs[..., 0][is_pair] == pytest.approx(1 / total)
    assert not pairs[~is_pair].any()
    assert np.array_equal(pairs[..., 1][is_pair], 2 * pair_ids[is_pair])
    assert np.array_equal(pairs[..., 2][is_pair], 2 * pair_ids[is_pair] + 1)


def test_targets_are_those_of_the_rows():
    found = samples()
    ids = np.arange(len(found))
    assert found.packed.plan.targets[ids].sum() == found.rows(ids).counts_BS.sum()


def test_an_odd_number_of_documents_is_refused():
    with pytest.raises(DataError, match="even number"):
        plan_pairs(np.array([2, 4, 6]), SIZE)
