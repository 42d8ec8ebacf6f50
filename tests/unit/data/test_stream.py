"""Streams: blends of token datasets, what they hold out, and which saved positions they refuse."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.runs import tiny_run

from meshwright.data.batches import Batches, build_batches, evaluation_batches
from meshwright.data.pack import pack
from meshwright.data.stream import open_stream
from meshwright.data.stream_report import report_stream
from meshwright.data.tokenize import ByteTokenizer
from meshwright.data.write import new_dataset
from meshwright.errors import DataError
from meshwright.spec import DataSpec

LENGTH = 32


class OtherTokenizer(ByteTokenizer):
    """Another tokenizer, by its hash."""

    hash = "0123456789abcdef"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three packed datasets: a is larger than b, c is a with another tokenizer."""
    folder, found = tmp_path_factory.mktemp("blend"), {}
    for name, count in (("a", 60), ("b", 25)):
        lines = [json.dumps({"text": f"{name}{line} " * (3 + line % 7)}) for line in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        pack([folder / f"{name}.jsonl"], folder / name, tokenizer=ByteTokenizer())
        found[name] = str(folder / name)
    pack([folder / "a.jsonl"], folder / "c", tokenizer=OtherTokenizer())
    return found | {"c": str(folder / "c")}


def blend_of(datasets: dict[str, str], **changes: object) -> DataSpec:
    parts = [{"path": datasets["a"], "weight": 0.7}, {"path": datasets["b"], "weight": 0.3}]
    return DataSpec.model_validate(
        {"blend": parts, "sequence_length": LENGTH, "batch_sequences": 10, "holdout_sequences": 4, **changes}
    )


def build(spec: DataSpec, **options: object) -> Batches:
    return build_batches(spec, **{"seed": 3, "vocab_size": 257, "dtype": torch.float64, **options})


def source_counts(batches: Batches, count: int) -> list[int]:
    """Samples of each dataset in the next batches."""
    ids = [sample for _ in range(count) for sample in next(batches).sample_ids]
    border = len(batches.stream.parts[0].samples)
    return [sum(sample < border for sample in ids), sum(sample >= border for sample in ids)]


def test_shares_are_exact_in_every_batch(datasets: dict[str, str]) -> None:
    batches = build(blend_of(datasets))
    for _ in range(20):
        assert source_counts(batches, 1) == [7, 3]
    batches.close()


def test_each_dataset_has_epochs_of_its_own(datasets: dict[str, str]) -> None:
    stream = open_stream(blend_of(datasets), seed=3, vocab_size=257)
    num_a, num_b = (part.num_training for part in stream.parts)
    border = len(stream.parts[0].samples)
    total = 10 * (num_a + num_b)
    ids = stream.order.sample_ids(0, total)
    for chosen, count in ((ids[ids < border], num_a), (ids[ids >= border], num_b)):
        first = chosen[:count].tolist()
        assert len(set(first)) == count  # the first epoch has every sample once
        second = chosen[count : 2 * count].tolist()
        assert sorted(second) == sorted(first)
        assert second != first
    assert stream.drawn(total) == [total * 7 // 10, total * 3 // 10]


def test_samples_are_held_out_of_each_dataset(datasets: dict[str, str]) -> None:
    spec = blend_of(datasets, holdout_sequences=10)
    stream = open_stream(spec, seed=3, vocab_size=257)
    assert [len(part.held_out) for part in stream.parts] == [7, 3]
    held_out = [i for batch in evaluation_batches(spec, vocab_size=257) for i in batch.sample_ids]
    assert held_out == stream.held_out.tolist()
    assert not set(held_out) & set(stream.order.sample_ids(0, 2000).tolist())


def test_datasets_end_as_the_spec_says(datasets: dict[str, str]) -> None:
    parts = [
        {"path": datasets["a"], "weight": 0.5, "repeat": False},
        {"path": datasets["b"], "weight": 0.5, "repeat": 2},
    ]
    spec = blend_of(datasets, blend=parts)
    stream = open_stream(spec, seed=3, vocab_size=257)
    num_a, num_b = (part.num_training for part in stream.parts)
    assert stream.num_samples == num_a + 2 * num_b
    handed = Counter(sample for batch in build(spec) for sample in batch.sample_ids)
    border = len(stream.parts[0].samples)
    assert set(handed.values()) == {1, 2}
    assert all(count == (1 if sample < border else 2) for sample, count in handed.items())
    assert len(handed) == num_a + num_b


def test_a_curriculum_changes_the_shares_at_its_steps(datasets: dict[str, str]) -> None:
    phases = [{"before_step": 3, "weights": [1, 0]}, {"before_step": 6, "weights": [0.5, 0.5]}]
    batches = build(blend_of(datasets, curriculum=phases))
    assert [source_counts(batches, 1) for _ in range(8)] == [[10, 0]] * 3 + [[5, 5]] * 3 + [[7, 3]] * 2
    batches.close()


CHANGES = [
    ({"weight": 0.6}, {}, "weights was"),
    ({"repeat": False}, {}, "repeat was None, None, is 1, None"),
    ({}, {"seed": 4}, "seed was 3, is 4"),
    ({}, {"sequence_length": 16}, "sequence_length was 32, is 16"),
    ({}, {"packing": "whole"}, "packing was cut, is whole"),
    ({}, {"shuffle": False}, "shuffle was True, is False"),
    ({}, {"shuffle": {"block_samples": 8}}, "shuffle was True"),
    ({}, {"holdout_sequences": 5}, "holdout_sequences was 4, is 5"),
    ({"path": "b"}, {}, "dataset fingerprint was"),
]


@pytest.mark.parametrize(("part", "change", "reason"), CHANGES)
def test_a_position_of_another_stream_is_refused_with_the_reason(
    datasets: dict[str, str], part: dict[str, object], change: dict[str, object], reason: str
) -> None:
    state = build(blend_of(datasets)).state()
    first = {"path": datasets["a"], "weight": 0.7, **part}
    first["path"] = datasets.get(str(first["path"]), str(first["path"]))
    options = {"seed": change.pop("seed")} if "seed" in change else {}
    parts = [first, {"path": datasets["b"], "weight": 0.3}]
    with pytest.raises(DataError, match=reason):
        build(blend_of(datasets, blend=parts, **change), **options).load_state(state)


def test_another_tokenizer_is_refused_with_the_reason(datasets: dict[str, str]) -> None:
    plain = DataSpec(path=datasets["a"], sequence_length=LENGTH, batch_sequences=10)
    state = build(plain).state()
    with pytest.raises(DataError, match=r"tokenizer was .*, is 0123456789abcdef"):
        build(plain.with_(path=datasets["c"])).load_state(state)
    parts = [{"path": datasets["a"], "weight": 1}, {"path": datasets["c"], "weight": 1}]
    with pytest.raises(DataError, match="is packed with"):
        build(blend_of(datasets, blend=parts))


def test_a_position_far_out_is_small_and_needs_no_replay(datasets: dict[str, str]) -> None:
    batches = build(blend_of(datasets))
    next(batches)
    state = {**batches.state(), "position": 10**9, "num_batches": 10**8}
    assert len(json.dumps(state)) < 4096
    started = time.process_time()
    batches.load_state(json.loads(json.dumps(state)))
    again = batches.state()
    seconds = time.process_time() - started
    assert again == state
    assert seconds < 1  # under 1 ms; a replay takes minutes
    expected = open_stream(blend_of(datasets), seed=3, vocab_size=257).order.sample_ids(10**9, 10)
    assert list(next(batches).sample_ids) == expected.tolist()
    batches.close()


def test_positions_of_plain_datasets_go_on_from_earlier_versions(datasets: dict[str, str]) -> None:
    """Their checkpoints have three integers, and the number of the stream is the same."""
    plain = DataSpec(path=datasets["a"], sequence_length=LENGTH, batch_sequences=10)
    batches = build(plain)
    state = {name: batches.state()[name] for name in ("position", "stream", "num_batches")}
    build(plain).load_state(state)
    with pytest.raises(DataError, match="another dataset or another sample order"):
        build(plain, seed=4).load_state(state)


def test_loss_weights_beside_tokens_scale_the_loss(tmp_path: Path) -> None:
    """Weight / sum of the weights of the global batch, in a run that cuts and in one that packs."""
    rng = np.random.default_rng(0)
    with new_dataset(tmp_path / "chat", ByteTokenizer(), is_weighted=True) as writer:
        documents = [rng.integers(0, 256, 20).astype(np.uint16) for _ in range(40)]
        writer.append(documents)
        writer.append_weights([rng.choice([0.0, 1.0, 0.5], size=21) for _ in documents])
        writer.finish([])
    for packing in ("cut", "whole"):
        spec = DataSpec(path=str(tmp_path / "chat"), sequence_length=42, batch_sequences=4, packing=packing)
        ranks = [build(spec, dp_rank=rank, dp_size=2) for rank in (0, 1)]
        for _ in range(3):
            batches = [next(rank) for rank in ranks]
            weights = [one.weights_BS for batch in batches for one in batch.microbatches]
            assert sum(float(one.sum()) for one in weights) == pytest.approx(1, abs=1e-9)
            assert sum(int((one > 0).sum()) for one in weights) == batches[0].num_tokens
            assert len({round(float(value), 9) for one in weights for value in one.unique()}) == 3
        for rank in ranks:
            rank.close()


def damage(folder: Path, token: int) -> None:
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(2 * token)
        file.write(b"\xff\xff")
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest |= {"sampled": {}, "modified_ns": {"tokens.bin": (folder / "tokens.bin").stat().st_mtime_ns}}
    (folder / "dataset.json").write_text(json.dumps(manifest))


def test_a_corrupt_sample_is_replaced_and_nothing_else_moves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("many words " * 100)
    pack([tmp_path / "a.txt"], tmp_path / "good", tokenizer=ByteTokenizer())
    pack([tmp_path / "a.txt"], tmp_path / "bad", tokenizer=ByteTokenizer())
    damage(tmp_path / "bad", 70)
    spec = DataSpec(path=str(tmp_path / "good"), sequence_length=64, batch_sequences=4, max_epochs=1)
    good = [batch.microbatches for batch in build(spec)]
    bad_spec = spec.with_(path=str(tmp_path / "bad"), max_bad_samples=1)
    bad = [batch.microbatches for batch in build(bad_spec)]
    changed = [
        (step, row)
        for step, (one, other) in enumerate(zip(good, bad, strict=True))
        for row in range(4)
        if not torch.equal(one[row].tokens_BS, other[row].tokens_BS)
    ]
    assert len(changed) == 1
    step, row = changed[0]
    planned, replaced = good[step][row].weights_BS.sum(), bad[step][row].weights_BS.sum()
    assert float(replaced) == pytest.approx(float(planned), rel=1e-6)
    assert "takes its place" in capfd.readouterr().err
    with pytest.raises(DataError, match="token 65535 is outside"):
        list(build(bad_spec.with_(max_bad_samples=0)))
    damage(tmp_path / "bad", 300)
    with pytest.raises(DataError, match="1 corrupt samples before it were replaced"):
        list(build(bad_spec))


def test_a_report_has_samples_tokens_and_epochs_of_each_dataset(datasets: dict[str, str]) -> None:
    run = tiny_run(num_sequences=30)
    run = run.with_(data=blend_of(datasets, packing="whole"), model=run.model.with_(vocab_size=257))
    run = run.with_(schedule=run.schedule.with_(num_steps=50))
    first, second = report_stream(run)
    assert first.num_samples * first.epochs == pytest.approx(350)
    assert second.num_samples * second.epochs == pytest.approx(150)
    assert first.line.startswith(f"{datasets['a']}: 70%, {first.num_samples} sequences, ")
    assert first.fill is not None and first.fill > 0.9
