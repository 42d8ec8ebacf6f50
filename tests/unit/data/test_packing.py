"""Packing of whole documents: full rows, every token once, and the loss of each document by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.runs import NUM_TOKENS, SEQUENCE_LENGTH, tiny_run
from tests.support.soak import examples

from meshwright.data import packing_cache
from meshwright.data.batches import build_batches
from meshwright.data.local_batch import read_local_batch
from meshwright.data.microbatch import BatchSharding
from meshwright.data.packed_samples import PackedSamples
from meshwright.data.packing import PackingPlan, best_fit_rows, plan_packing
from meshwright.data.packing_cache import open_packing
from meshwright.data.samples import PADDING
from meshwright.data.sources import TokensInMemory
from meshwright.errors import DataError
from meshwright.models.decoder import build_decoder
from meshwright.models.initialise import initialise
from meshwright.spec import DataSpec, SyntheticSpec

EOS = NUM_TOKENS - 1


def source_of(lengths: list[int], *, weighted: bool = False) -> TokensInMemory:
    """Documents of these lengths with random tokens, EOS at the end; weights are random too."""
    rng = np.random.default_rng(len(lengths))
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = rng.integers(0, EOS, size=int(ends[-1])).astype(np.uint16)
    tokens[ends - 1] = EOS
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], size=len(tokens)).astype(np.float16) if weighted else None
    return TokensInMemory("test", tokens, ends, NUM_TOKENS, "test", weights)


def packed(source: TokensInMemory, size: int) -> PackedSamples:
    return PackedSamples(source, size, plan_packing(source.document_ends, size))


@examples(60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), size=st.integers(1, 24))
def test_every_token_is_in_one_row_and_no_row_overflows(lengths: list[int], size: int) -> None:
    plan = plan_packing(np.cumsum(lengths), size)
    seen = np.concatenate(
        [np.arange(start, start + length) for start, length in zip(plan.starts, plan.lengths, strict=True)]
    )
    assert sorted(seen.tolist()) == list(range(sum(lengths)))
    row_tokens = [
        int(plan.lengths[first:last].sum())
        for first, last in zip(plan.row_offsets, plan.row_offsets[1:], strict=False)
    ]
    assert max(row_tokens) <= size
    assert min(row_tokens) >= 1


@examples(60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), size=st.integers(2, 24))
def test_rows_by_the_definition(lengths: list[int], size: int) -> None:
    """Token by token: targets continue their document, positions restart, documents are apart."""
    source = source_of(lengths)
    samples = packed(source, size)
    ids = np.arange(len(samples))
    rows = samples.rows(ids)
    plan, owner = samples.plan, np.repeat(np.arange(len(lengths)), lengths)
    assert samples.targets(ids).count == rows.counts_BS.sum() == len(owner) - len(lengths)
    assert rows.documents_BS is not None
    for row in range(len(samples)):
        place = 0
        for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
            start, length = int(plan.starts[piece]), int(plan.lengths[piece])
            here = slice(place, place + length)
            assert rows.tokens_BS[row, here].tolist() == source.tokens[start : start + length].tolist()
            assert rows.positions_BS[row, here].tolist() == list(range(length))
            assert len(set(rows.documents_BS[row, here].tolist())) == 1
            for token in range(start, start + length):
                goes_on = token + 1 < len(owner) and owner[token + 1] == owner[token]
                at = place + token - start
                assert rows.counts_BS[row, at] == goes_on
                if goes_on:
                    assert rows.targets_BS[row, at] == source.tokens[token + 1]
            place += length
        assert not rows.counts_BS[row, place:].any()
        num_pieces = int(plan.row_offsets[row + 1] - plan.row_offsets[row])
        assert len(set(rows.documents_BS[row].tolist())) == num_pieces + (place < size)


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    assert best_fit_rows(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]
    assert best_fit_rows(np.array([5, 5, 5, 5, 1]), 10).tolist() == [0, 0, 1, 1, 2]


def heavy_tailed(count: int) -> np.ndarray:
    """Log-normal lengths, median 400 and mean about 1,070 tokens, some of 100,000."""
    return np.maximum(1, np.random.default_rng(0).lognormal(6.0, 1.4, count).astype(np.int64))


def test_rows_are_full() -> None:
    """99.99% on heavy-tailed lengths; `bench.data` measures how fast it is planned."""
    assert plan_packing(np.cumsum(heavy_tailed(200_000)), 8192).fill(8192) > 0.99


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_of_a_pack_is_the_sum_of_the_losses_of_its_documents(weighted: bool) -> None:
    """Through the real model in float64, with and without loss weights."""
    run = tiny_run()
    model = build_decoder(run.model, dtype=torch.float64)
    initialise(model, seed=5)

    def loss_sum(source: TokensInMemory) -> float:
        samples = packed(source, SEQUENCE_LENGTH)
        ids = np.arange(len(samples))
        sharding = BatchSharding(len(ids), len(ids), 0, 1, torch.device("cpu"), torch.float64)
        (one,) = read_local_batch(samples, ids, sharding, total_ids=ids).on_device().microbatches
        loss = model(
            one.tokens_BS,
            positions_BS=one.positions_BS,
            document_offsets_P=one.document_offsets_P,
            longest_document=one.longest_document,
            targets_BS=one.targets_BS,
            weights_BS=one.weights_BS,
            num_targets=one.num_targets,
        )
        return float(loss.detach()) * samples.targets(ids).weight

    lengths = [7, 3, 5, 9, 2, 16, 4]
    together = source_of(lengths, weighted=weighted)
    apart, start = 0.0, 0
    for length in lengths:
        end = start + length
        weights = None if together.loss_weights is None else together.loss_weights[start:end]
        tokens = together.tokens[start:end]
        apart += loss_sum(TokensInMemory("one", tokens, np.array([length]), NUM_TOKENS, "one", weights))
        start = end
    assert len(packed(together, SEQUENCE_LENGTH)) < len(lengths)  # rows have several documents
    assert loss_sum(together) == pytest.approx(apart, rel=1e-12)


def test_padding_rows_count_nothing() -> None:
    rows = packed(source_of([7, 3, 5], weighted=True), 8).rows(np.array([PADDING, 1, PADDING]))
    assert rows.counts_BS.any(axis=1).tolist() == [False, True, False]


def test_a_large_plan_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_cache, "MIN_CACHED_DOCUMENTS", 2)
    source = source_of([7, 3, 5, 9])
    first, _ = open_packing(source, 8, folder=tmp_path)
    monkeypatch.setattr(packing_cache, "plan_packing", None)  # planning again would fail
    second, _ = open_packing(source, 8, folder=tmp_path)
    for name in PackingPlan.__dataclass_fields__:
        assert getattr(first, name).tolist() == getattr(second, name).tolist()


def test_a_run_packs_whole_documents() -> None:
    spec = DataSpec(
        synthetic=SyntheticSpec(num_documents=12), sequence_length=2048, batch_sequences=2, packing="whole"
    )
    batches = build_batches(spec, seed=1, vocab_size=257)
    for _ in range(8):
        for one in next(batches).microbatches:
            tokens, weights = one.tokens_BS[0], one.weights_BS[0]
            assert not weights[tokens == 256].any()  # the end-of-document token has no target
            assert (one.positions_BS[0] == 0).sum() >= 1
    batches.close()


def test_empty_documents_are_refused() -> None:
    with pytest.raises(DataError, match="do not increase"):
        plan_packing(np.array([3, 3, 5]), 8)
