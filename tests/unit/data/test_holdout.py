"""Held-out documents and sequences by a hash: exact parts, stable under growth, never trained on."""

from typing import Any

import numpy as np
import pytest
from tests.support.token_ledger import TokenRanks

from meshwright.data.batches import build_batches, evaluation_batches
from meshwright.data.holdout import ReorderedSamples, held_out_documents, held_out_sequences
from meshwright.data.packing import plan_packing
from meshwright.data.samples import PADDING, Samples
from meshwright.data.sources import TokensInMemory
from meshwright.data.stream import open_stream
from meshwright.errors import DataError
from meshwright.spec import DataSpec
from meshwright.spec.data import HoldoutSpec


def documents(numbers: range) -> TokensInMemory:
    """Documents of 3 to 9 tokens; each number has a document of its own."""
    parts = [np.full(3 + number % 7, number, dtype=np.uint16) for number in numbers]
    return TokensInMemory("texts", np.concatenate(parts), np.cumsum([len(one) for one in parts]), 60_000, "f")


@pytest.mark.parametrize("by", ["number", "content"])
def test_a_share_is_held_out_and_growth_moves_nothing(by: Any) -> None:
    spec = HoldoutSpec(share=0.1, by=by, seed=3)
    few, many = (held_out_documents(documents(range(count)), spec) for count in (4000, 6000))
    assert 0.08 < few.mean() < 0.12
    assert np.array_equal(many[:4000], few)
    assert not np.array_equal(held_out_documents(documents(range(4000)), spec.with_(seed=4)), few)
    if by == "content":  # also where documents before it are removed
        assert np.array_equal(held_out_documents(documents(range(500, 4000)), spec), few[500:])


def test_copies_of_a_document_stay_on_one_side() -> None:
    once = documents(range(200))
    ends = np.concatenate([once.document_ends, once.document_ends + len(once.tokens)])
    twice = TokensInMemory("twice", np.tile(once.tokens, 2), ends, 60_000, "f")
    chosen = held_out_documents(twice, HoldoutSpec(share=0.3, by="content"))
    assert np.array_equal(chosen[:200], chosen[200:]) and chosen.any()


@pytest.mark.parametrize("by", ["number", "content"])
def test_sequences_are_reordered_without_loss(by: Any) -> None:
    samples = Samples(documents(range(3000)), 16, separate=True)
    chosen = held_out_sequences(samples, HoldoutSpec(share=0.05, by=by))
    found = ReorderedSamples(samples, chosen)
    assert found.num_training == int((~chosen).sum()) and len(found) == len(samples)
    order = np.concatenate([np.flatnonzero(~chosen), np.flatnonzero(chosen)])
    ids = np.array([0, 1, found.num_training - 1, found.num_training, len(found) - 1, PADDING])
    expected = np.append(order[ids[:-1]], PADDING)
    assert np.array_equal(found.rows(ids).window_BW, samples.rows(expected).window_BW)
    assert found.targets(ids) == samples.targets(expected)
    every = found.rows(np.arange(len(found))).window_BW
    assert np.array_equal(every, samples.rows(order).window_BW)


def spec_of(packing: str, **changes: Any) -> DataSpec:
    blend = [
        {"synthetic": {"num_documents": 40}, "weight": 0.6},
        {"synthetic": {"num_documents": 30, "seed": 1}, "weight": 0.4},
    ]
    settings = {"sequence_length": 128, "batch_sequences": 24, "packing": packing, "holdout": {"share": 0.1}}
    return DataSpec.model_validate({"blend": blend} | settings | changes)


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_no_document_of_the_evaluation_is_trained_on(packing: str) -> None:
    """The stream survives a cut on other ranks, and evaluation reads the held-out part of each dataset."""
    spec = spec_of(packing)
    stream = open_stream(spec, seed=3, vocab_size=257)
    order = set(stream.order.sample_ids(0, 3 * len(stream.samples)).tolist())
    assert not order & set(stream.held_out.tolist())
    assert order | set(stream.held_out.tolist()) == set(range(len(stream.samples)))
    evaluated = [one for batch in evaluation_batches(spec, vocab_size=257) for one in batch.sample_ids]
    assert evaluated == stream.held_out.tolist()
    golden, before, after = TokenRanks(spec, 1), TokenRanks(spec, 2), TokenRanks(spec, 4)
    expected = golden.steps(5)
    assert before.steps(2) == expected[:2]
    after.restore(before.state())
    assert after.steps(3) == expected[2:]
    for ranks in (golden, before, after):
        ranks.close()
    other = build_batches(spec_of(packing, holdout={"share": 0.1, "seed": 5}), seed=3, vocab_size=257)
    with pytest.raises(DataError, match=r"holdout was share=0\.1"):
        other.load_state(before.state())
    other.close()


def test_whole_documents_are_packed_by_part() -> None:
    source = documents(range(500))
    chosen = held_out_documents(source, HoldoutSpec(share=0.2))
    plan = plan_packing(source.document_ends, 16, chosen=chosen)
    starts = np.concatenate([[0], source.document_ends[:-1]])
    assert sorted(plan.starts.tolist()) == starts[chosen].tolist()


def test_a_part_without_documents_is_refused() -> None:
    few = documents(range(20))
    with pytest.raises(DataError, match=r"holdout share=1e-09 of 20 leaves nothing for evaluation"):
        held_out_documents(few, HoldoutSpec(share=1e-9))
    with pytest.raises(DataError, match="leaves nothing for training"):
        held_out_documents(few, HoldoutSpec(share=0.999999999))
