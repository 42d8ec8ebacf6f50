"""Batches: one global order, however it is split, stopped and resumed."""

import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data.batches import Batch, Batches, build_batches, evaluation_batches
from meshwright.data.file_check import sampled_hash, sha256_of
from meshwright.data.pack import pack
from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import DataError
from meshwright.spec import DataSpec, SyntheticSpec

SMALL = SyntheticSpec(num_documents=12)
SPEC = DataSpec(synthetic=SMALL, sequence_length=64, batch_sequences=12, max_epochs=2, holdout_sequences=7)
SPLITS = [(1, 1), (1, 12), (2, 1), (2, 3), (3, 2), (4, 3), (6, 1), (12, 1)]


def build(spec: DataSpec = SPEC, **options: object) -> Batches:
    return build_batches(spec, **{"seed": 3, "vocab_size": 257, "dtype": torch.float64, **options})


def rows_of(batches: list[Batch]) -> Counter[tuple[object, ...]]:
    """Every sequence with a weight, with all its tensors; documents follow from the positions."""
    found: Counter[tuple[object, ...]] = Counter()
    for batch in batches:
        for one in batch.microbatches:
            for row in range(len(one.tokens_BS)):
                if one.sequence_weights_B[row] > 0:
                    rest = one._replace(document_offsets_P=None, longest_document=None, num_targets=None)
                    found[
                        tuple(tuple(part[row].reshape(-1).tolist()) for part in rest if part is not None)
                    ] += 1
    return found


def ids_of(batches: Batches, count: int | None = None) -> list[int]:
    taken = list(batches) if count is None else [next(batches) for _ in range(count)]
    return [sample for batch in taken for sample in batch.sample_ids]


@pytest.mark.parametrize(("dp_size", "microbatch_sequences"), SPLITS)
def test_any_split_reads_the_same_sequences_with_the_same_weights(
    dp_size: int, microbatch_sequences: int
) -> None:
    full = list(build())
    spec = SPEC.with_(microbatch_sequences=microbatch_sequences)
    ranks = [list(build(spec, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]
    for step, batch in enumerate(full):
        parts = [rank[step] for rank in ranks]
        assert rows_of(parts) == rows_of([batch])
        assert {part.sample_ids for part in parts} == {batch.sample_ids}
        assert {part.num_tokens for part in parts} == {batch.num_tokens}
        assert {len(part.microbatches) for part in parts} == {12 // (dp_size * microbatch_sequences)}
    assert {len(rank) for rank in ranks} == {len(full)}


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_an_epoch_reads_every_training_sample_once(dp_size: int) -> None:
    """By content: what the ranks were handed, not what a batch says of itself."""
    spec = SPEC.with_(max_epochs=1)
    handed: Counter[tuple[int, ...]] = Counter()
    for rank in range(dp_size):
        for batch in build(spec, dp_rank=rank, dp_size=dp_size):
            for one in batch.microbatches:
                handed.update(tuple(row) for row in one.tokens_BS[one.sequence_weights_B > 0].tolist())
    samples = build(spec).samples
    training = samples.rows(np.arange(len(samples) - SPEC.holdout_sequences)).tokens_BS
    assert handed == Counter(tuple(row) for row in training.tolist())


def test_weights_of_a_step_add_up_to_one() -> None:
    for batch in build():
        counted = sum(int((one.weights_BS > 0).sum()) for one in batch.microbatches)
        assert counted == batch.num_tokens
        total = sum(float(one.weights_BS.sum()) for one in batch.microbatches)
        assert total == pytest.approx(1, abs=1e-12)  # float64 sum of at most 768 equal terms
        sequences = sum(float(one.sequence_weights_B.sum()) for one in batch.microbatches)
        assert sequences == pytest.approx(1, abs=1e-12)


def test_the_last_batch_is_short_and_filled_up_on_every_rank() -> None:
    ranks = [list(build(dp_rank=rank, dp_size=12)) for rank in range(12)]
    last = [rank[-1] for rank in ranks]
    num_samples = build().order.num_samples * 2
    assert last[0].num_sequences == num_samples % 12 != 0
    without_any = [batch for batch in last if float(batch.microbatches[0].weights_BS.sum()) == 0]
    assert len(without_any) == 12 - last[0].num_sequences
    for batch in without_any:
        assert len(batch.microbatches) == 1
        assert float(batch.microbatches[0].sequence_weights_B.sum()) == 0
        assert batch.microbatches[0].tokens_BS.shape == (1, 64)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 7, 13])
def test_stop_and_resume_on_other_worlds_continues_the_stream(stop_after: int) -> None:
    uninterrupted = ids_of(build())
    first = build(dp_rank=1, dp_size=2)
    seen = ids_of(first, stop_after)
    state = first.state()
    for dp_size in (1, 3, 4):
        resumed = build(dp_rank=dp_size - 1, dp_size=dp_size)
        resumed.load_state(state)
        assert resumed.state() == state
        assert seen + ids_of(resumed) == uninterrupted


def test_resuming_with_another_batch_size_continues_the_stream() -> None:
    first = build()
    seen = ids_of(first, 3)
    resumed = build(SPEC.with_(batch_sequences=5))
    resumed.load_state(first.state())
    assert seen + ids_of(resumed) == ids_of(build())


def test_a_chain_of_stops_loses_and_repeats_nothing() -> None:
    state, seen = build().state(), []
    for dp_size in (2, 1, 4, 3, 6, 2):
        batches = build(dp_size=dp_size)
        batches.load_state(state)
        seen += ids_of(batches, 2)
        state = batches.state()
    assert seen == ids_of(build(), 12)


def test_position_counts_batches_handed_out_only() -> None:
    batches = build()
    next(batches)
    batches.close()  # waits for what was being made ahead
    assert batches.position == 12
    assert batches.state()["position"] == 12


def test_loading_a_state_forgets_what_was_made_ahead() -> None:
    batches = build()
    start = batches.state()
    first = ids_of(batches, 3)
    batches.load_state(start)
    assert ids_of(batches, 3) == first


def test_state_is_small_and_json_keeps_it_exactly() -> None:
    state = build().state()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 4096
    assert all(value < 2**53 for value in state.values() if isinstance(value, int))


@pytest.mark.parametrize(
    ("change", "seed"),
    [
        ({"synthetic": SyntheticSpec(num_documents=13)}, 3),
        ({"sequence_length": 32}, 3),
        ({"shuffle": False}, 3),
        ({"holdout_sequences": 8}, 3),
        ({}, 4),
    ],
)
def test_a_position_in_another_stream_is_refused(change: dict[str, object], seed: int) -> None:
    state = build().state()
    with pytest.raises(DataError, match="is from another dataset"):
        build(SPEC.with_(**change), seed=seed).load_state(state)


def test_without_max_epochs_the_data_starts_over() -> None:
    batches = build(SPEC.with_(max_epochs=None, batch_sequences=1000))
    batch = next(batches)
    per_epoch = batches.order.num_samples
    assert per_epoch < 1000
    assert batch.num_sequences == 1000
    assert sorted(batch.sample_ids[:per_epoch]) == sorted(batch.sample_ids[per_epoch : 2 * per_epoch])
    assert batch.sample_ids[:per_epoch] != batch.sample_ids[per_epoch : 2 * per_epoch]


def test_sizes_follow_the_ramp_from_any_batch() -> None:
    """The index of a batch decides how large it is, so a run may change it and keep its position."""
    spec = SPEC.with_(
        max_epochs=None,
        batch_sequences=8,
        batch_ramp=[{"before_step": 2, "batch_sequences": 2}, {"before_step": 3, "batch_sequences": 4}],
    )
    batches = build(spec)
    taken = [next(batches) for _ in range(5)]
    assert [batch.num_sequences for batch in taken] == [2, 2, 4, 8, 8]
    assert [spec.batch_sequences_of(index) for index in range(5)] == [2, 2, 4, 8, 8]
    assert [spec.num_sequences(count) for count in range(6)] == [0, 2, 4, 8, 16, 24]
    for index in range(5):
        later = build(spec)
        later.load_state({**batches.state(), "position": spec.num_sequences(index), "num_batches": index})
        assert next(later).sample_ids == taken[index].sample_ids


def test_joined_documents_have_no_document_tensor() -> None:
    batch = next(build(SPEC.with_(documents="joined")))
    assert all(one.document_offsets_P is None for one in batch.microbatches)
    assert all(one.longest_document is None for one in batch.microbatches)
    assert batch.num_tokens == 12 * 64


def test_a_pipeline_may_split_every_tensor_along_its_first_dim() -> None:
    """Sequences come first; offsets of documents have one length in all micro-batches."""
    batch = next(build(SPEC.with_(microbatch_sequences=3), dtype=torch.float32))
    for one in batch.microbatches:
        tensors = {name: part for name, part in one._asdict().items() if isinstance(part, torch.Tensor)}
        offsets_P = tensors.pop("document_offsets_P")
        assert len(offsets_P) == 16 and offsets_P[0] == 0 and offsets_P[-1] == 3 * 64
        assert one.longest_document == int(offsets_P.diff().max()) <= 64
        assert one.num_targets == int((one.weights_BS > 0).sum())
        assert {len(part) for part in tensors.values()} == {3}
        assert [part.dtype for part in tensors.values()] == [
            torch.int64, torch.int64, torch.float32, torch.int64, torch.float32,
        ]  # fmt: skip
        assert offsets_P.dtype == torch.int32
        assert all(part.is_contiguous() for part in (offsets_P, *tensors.values()))


def test_document_offsets_are_where_positions_restart() -> None:
    for one in next(build(SPEC.with_(microbatch_sequences=3))).microbatches:
        assert one.document_offsets_P is not None
        begins = (one.positions_BS.flatten() == 0).nonzero().flatten()
        found = one.document_offsets_P.unique()
        assert torch.equal(found[:-1].long(), begins) and int(found[-1]) == one.tokens_BS.numel()


@pytest.mark.parametrize(("dp_size", "microbatch_sequences"), SPLITS)
def test_evaluation_is_the_same_for_every_split(dp_size: int, microbatch_sequences: int) -> None:
    spec = SPEC.with_(microbatch_sequences=microbatch_sequences)
    options = {"vocab_size": 257, "dtype": torch.float64}
    ranks = [
        list(evaluation_batches(spec, dp_rank=rank, dp_size=dp_size, **options)) for rank in range(dp_size)
    ]
    parts = [batch for rank in ranks for batch in rank]
    assert rows_of(parts) == rows_of(list(evaluation_batches(SPEC, **options)))
    assert len({len(batch.microbatches) for batch in parts}) == 1
    total = sum(float(one.weights_BS.sum()) for batch in parts for one in batch.microbatches)
    assert total == pytest.approx(1, abs=1e-12)


def test_evaluation_reads_the_held_out_samples_and_training_never_does() -> None:
    spec = SPEC.with_(batch_sequences=3)
    held_out = [i for b in evaluation_batches(spec, vocab_size=257) for i in b.sample_ids]
    num_samples = len(build().samples)
    assert held_out == list(range(num_samples - 7, num_samples))
    assert not set(held_out) & set(ids_of(build()))


def test_evaluation_without_holdout_is_empty() -> None:
    assert list(evaluation_batches(SPEC.with_(holdout_sequences=0), vocab_size=257)) == []


@pytest.mark.parametrize(
    ("change", "options", "fact"),
    [
        ({"sequence_length": 10**6}, {}, "fewer than one sequence"),
        ({"holdout_sequences": 10**5}, {}, "leaves nothing to train on"),
        ({}, {"vocab_size": 256}, "vocabulary has 257 tokens, the model's only 256"),
        ({}, {"dp_size": 5}, "not a multiple"),
        ({"synthetic": None}, {}, "neither path nor synthetic"),
        ({"path": "somewhere"}, {}, "both path and synthetic"),
        ({"synthetic": None, "path": "/no/such/dataset"}, {}, "there is no dataset here"),
    ],
)
def test_data_that_does_not_suit_is_refused_with_a_hint(
    change: dict[str, object], options: dict[str, object], fact: str
) -> None:
    with pytest.raises(DataError, match=fact) as caught:
        build(SPEC.with_(**change), **options)
    assert caught.value.hint
    assert caught.value.where


def vouch_for(folder: Path) -> None:
    """Write the hashes of tokens.bin as it is now: a dataset that was packed with a damaged token."""
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["sha256"]["tokens.bin"] = sha256_of(folder / "tokens.bin")
    manifest["sampled"]["tokens.bin"] = sampled_hash(folder / "tokens.bin")
    (folder / "dataset.json").write_text(json.dumps(manifest))


def test_a_damaged_token_stops_the_run_with_a_fact(tmp_path: Path) -> None:
    """Found in the background thread, raised in the foreground, and never passed to the model."""
    (tmp_path / "a.txt").write_text("many words " * 100)
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer())
    with (tmp_path / "data" / "tokens.bin").open("r+b") as file:
        file.seek(2 * 70)
        file.write(b"\xff\xff")
    vouch_for(tmp_path / "data")
    spec = DataSpec(path=str(tmp_path / "data"), sequence_length=64, batch_sequences=1, shuffle=False)
    batches = build(spec)
    next(batches)
    with pytest.raises(DataError, match="token 65535 is outside") as caught:
        next(batches)
    assert "verify" in caught.value.hint
    assert batches.position == 1


def test_closing_ends_the_background_thread() -> None:
    before = set(threading.enumerate())
    batches = build()
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device_unchanged() -> None:
    host, device = list(build()), list(build(device="cuda"))
    assert all(one.tokens_BS.is_cuda for batch in device for one in batch.microbatches)
    assert rows_of(device) == rows_of(host)


def test_dropout_keys_follow_the_place_in_the_global_batch() -> None:
    """However the batch is split, each of its sequences has its own keys, and other ones in the next step."""

    def keys(microbatch: int, dp_size: int) -> list[torch.Tensor]:
        spec = SPEC.with_(batch_sequences=8, microbatch_sequences=microbatch)
        ranks = [build(spec, dp_rank=rank, dp_size=dp_size, has_dropout=True) for rank in range(dp_size)]
        steps = []
        for _ in range(2):
            parts = [[one.dropout_keys_BS for one in next(rank).microbatches] for rank in ranks]
            steps.append(torch.cat([part for each in zip(*parts, strict=True) for part in each]))
        for rank in ranks:
            rank.close()
        return steps

    first, second = keys(8, 1)
    assert first.unique().numel() == first.numel() and not torch.isin(second, first).any()
    for microbatch, dp_size in ((2, 1), (1, 4), (2, 2)):
        assert all(map(torch.equal, keys(microbatch, dp_size), (first, second)))
