"""The loader: one stream of samples, however it is cut, resumed, sharded and read ahead."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ledger import Ranks, digest, ledger, words
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.data.grouping import group_by_length
from meshwright.data.loader import RecordDataset, open_loader
from meshwright.data.order import Blocks
from meshwright.data.readers.door import open_source
from meshwright.data.record_file import report_records
from meshwright.data.record_sets import JoinedRecords, split_by_hash
from meshwright.data.records import KEY, RecordError, RecordsInMemory
from meshwright.data.token_loader import TokenLoader
from meshwright.errors import DataError, RunError, SpecError
from meshwright.spec import DataSpec, SyntheticSpec
from meshwright.spec.records_file import read_records

STEPS = 14
# 24 samples per step of 110 + 70 samples: an epoch ends in step 7, a block of 16 and a window in most.
SETTINGS: dict[str, Any] = {"batch_samples": 24, "seed": 5}


def sources_of(blend: str, join: str) -> dict[str, Any]:
    """The sources and weights of a case."""
    first: Any = words("a", 110)
    if join == "join":
        first = JoinedRecords([first, words("caption", 100, seed=9)], missing="skip")
    if blend == "none":
        return {"sources": first}
    weights = {"even": {}, "weights": {"weights": (0.7, 0.3)}, "rare": {"weights": (0.999, 0.001)}}[blend]
    return {"sources": [first, words("b", 70, seed=1)], **weights}


# Every pair of choices occurs.
CASES = [
    ("none", "alone", "single", "full"),
    ("none", "join", "group", "block"),
    ("even", "alone", "group", "off"),
    ("even", "join", "single", "block"),
    ("weights", "alone", "group", "block"),
    ("weights", "join", "single", "full"),
    ("weights", "alone", "single", "off"),
    ("rare", "join", "group", "full"),
    ("rare", "alone", "single", "block"),
    ("none", "join", "single", "off"),
    ("rare", "join", "group", "off"),
    ("even", "alone", "group", "full"),
]
# Cuts at 0, 1, around the workers and what they read ahead, and around the end of an epoch.
CUTS = [(0, 3), (1, 2), (2, 1), (3, 0), (4, 3), (5, 1), (6, 2), (7, 1), (8, 3), (12, 2), (13, 0)]


def settings_of(blend: str, join: str, group: str, shuffle: str) -> dict[str, Any]:
    order = {"full": True, "block": Blocks(16, 3), "off": False}[shuffle]
    grouped = {"max_tokens": 120} if group == "group" else {}
    return SETTINGS | sources_of(blend, join) | {"shuffle": order} | grouped


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_resume_is_exact_for_every_composition(case: tuple[str, str, str, str]) -> None:
    """Digests of ordered global batches after cuts at borders, on other ranks and workers."""
    settings = settings_of(*case)
    expected = ledger(Ranks(num_ranks=1, **settings), STEPS)
    first = CASES.index(case)
    for cut, workers in [CUTS[(first + 2 * number) % len(CUTS)] for number in range(5)]:
        ranks = Ranks(num_ranks=2, num_workers=workers, workers="threads", prefetch=3, **settings)
        assert ledger(ranks, cut) == expected[:cut]
        state = json.loads(json.dumps(ranks.state()))
        ranks.close()
        resumed = Ranks(num_ranks=3, num_workers=workers, workers="threads", **settings)
        resumed.restore(state)
        assert resumed.state() == state  # save -> load -> save
        assert ledger(resumed, STEPS - cut) == expected[cut:]
        resumed.close()


@pytest.mark.parametrize("weights", [None, (0.7, 0.3)])
def test_a_chain_of_rank_counts_gives_equal_ordered_batches(weights: tuple[float, ...] | None) -> None:
    """Global batch 24 on 2, 1, 4, 3, 8, 6 and 2 ranks, saved after every step; random numbers included."""
    settings: dict[str, Any] = {**SETTINGS, "sources": [words("a", 110), words("b", 70, seed=1)]}
    settings |= {"weights": weights} if weights else {}
    expected = ledger(Ranks(num_ranks=1, **settings), STEPS)
    found: list[str] = []
    state = Ranks(num_ranks=1, **settings).state()
    for num_ranks in (2, 1, 4, 3, 8, 6, 2):
        ranks = Ranks(num_ranks=num_ranks, **settings)
        ranks.restore(state)
        for _ in range(2):
            found += ledger(ranks, 1)
            state = ranks.state()  # saving changes nothing
        ranks.close()
    assert found == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_an_epoch_has_every_sample_once(num_ranks: int) -> None:
    """The last batch has 12 samples: fewer than 24, more than the ranks."""
    ranks = Ranks([words("a", 110), words("b", 70, seed=1)], num_ranks, max_epochs=1, **SETTINGS)
    seen: Counter[tuple[str, bytes]] = Counter()
    while batch := ranks.step():
        seen.update((key, content) for key, content, _ in batch)
    assert len(seen) == 180
    assert set(seen.values()) == {1}


def test_a_dataset_smaller_than_a_batch_or_the_ranks_ends_on_all_ranks_together() -> None:
    ranks = Ranks(words("a", 5), 8, max_epochs=1, **SETTINGS)
    assert len(ranks.step()) == 5
    assert [loader.is_counted for loader in ranks.loaders].count(True) == 5
    assert ranks.step() == []
    endless = Ranks(words("a", 5), 2, **SETTINGS)
    keys = [key for key, _, _ in endless.step()]
    assert Counter(keys[:20]) == dict.fromkeys(set(keys), 4)


def test_a_rank_count_that_does_not_divide_is_refused_before_the_first_batch() -> None:
    with pytest.raises(DataError, match="not a multiple of 5"):
        Ranks(words("a", 110), 5, **SETTINGS)


def test_prefetched_batches_do_not_count() -> None:
    ranks = Ranks(words("a", 110), 1, num_workers=3, workers="threads", prefetch=8, **SETTINGS)
    ranks.step()
    time.sleep(0.05)  # the threads are far ahead
    assert ranks.state()["position"] == 24
    ranks.close()


def test_worker_processes_give_the_same_stream() -> None:
    settings = SETTINGS | {"sources": [words("a", 110), words("b", 70, seed=1)], "weights": (0.7, 0.3)}
    expected = ledger(Ranks(num_ranks=1, **settings), 6)
    ranks = Ranks(num_ranks=1, num_workers=2, workers="processes", **settings)
    assert ledger(ranks, 6) == expected
    ranks.close()


def killed_once(record: Any, rng: np.random.Generator) -> int:
    """Ends the worker process at one record."""
    del rng
    if record[KEY] == "0042":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(record[KEY])


def test_a_killed_worker_is_an_error_and_a_restored_loader_goes_on() -> None:
    loader = open_loader(words("a", 64), batch_samples=8, shuffle=False, num_workers=2, transform=killed_once)
    taken: list[int] = []
    state = loader.state()
    with pytest.raises(RunError, match="worker process"):
        while True:
            taken += next(loader).tolist()
            state = loader.state()
    assert state["position"] == len(taken) <= 40
    resumed = open_loader(words("a", 64), batch_samples=8, shuffle=False)
    resumed.restore(state)
    assert [int(str(one[KEY])) for one in next(resumed)] == list(range(len(taken), len(taken) + 8))


class Broken(RecordsInMemory):
    """Some records cannot be read."""

    def record(self, index: int) -> Any:
        if index % 17 == 3:
            raise RecordError("truncated JPEG", file="a.tar", offset=512 * index, key=f"{index:04d}")
        return super().record(index)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "threads"}])
def test_a_corrupt_record_is_named(workers: dict[str, Any]) -> None:
    source = Broken("a", words("a", 110).records, "a")
    loader = open_loader(source, batch_samples=24, **workers)
    with pytest.raises(RecordError, match="truncated JPEG") as caught:
        for _ in range(5):
            next(loader)
    assert caught.value.where == f"a.tar, offset {caught.value.offset}, key {caught.value.key}"
    loader.close()


def test_substitutes_are_planned_counted_and_limited() -> None:
    good, source = words("a", 110), Broken("a", words("a", 110).records, "a")
    settings = SETTINGS | {"max_epochs": 1}
    ranks = [Ranks(source, count, max_bad_samples=7, **settings) for count in (1, 4)]
    plain = Ranks(good, 1, **settings)
    for _ in range(5):
        one, four, intact = ranks[0].step(), ranks[1].step(), plain.step()
        assert digest(one) == digest(four)
        assert len(one) == len(intact)
        changed = [there for here, there in zip(one, intact, strict=True) if here != there]
        assert all(int(key) % 17 == 3 for key, _, _ in changed)  # nothing else moves
    assert len(ranks[0].loaders[0].bad_samples) == 7
    limited = Ranks(source, 1, max_bad_samples=2, **settings)
    with pytest.raises(DataError, match="were replaced before"):
        for _ in range(5):
            limited.step()


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"seed": 6}, "seed was 5, is 6"),
    ({"weights": (0.6, 0.4)}, "weights was"),
    ({"shuffle": False}, "shuffle was True, is False"),
    ({"max_epochs": 2}, "max_epochs was None, is 2"),
    ({"sources": [words("a", 110), words("b", 71, seed=1)]}, "dataset fingerprint was"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGED)
def test_a_position_of_another_stream_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    settings = SETTINGS | {"sources": [words("a", 110), words("b", 70, seed=1)], "weights": (0.7, 0.3)}
    state = Ranks(num_ranks=1, **settings).state()
    with pytest.raises(DataError, match=reason):
        Ranks(num_ranks=1, **(settings | change)).restore(state)


def test_a_state_is_small_and_a_position_far_out_needs_no_replay() -> None:
    loader = open_loader([words("a", 110), words("b", 70)], weights=(0.7, 0.3), **SETTINGS)
    state = {**loader.state(), "position": 10**9}
    assert len(json.dumps(state)) < 4096
    started = time.process_time()
    loader.restore(state)
    next(loader)
    assert time.process_time() - started < 1  # a replay takes minutes


def test_a_join_merges_fields_and_names_a_missing_partner() -> None:
    images, captions = words("jpg", 30), words("txt", 20, seed=2)
    joined = JoinedRecords([images, captions], missing="skip")
    assert len(joined) == 20
    assert set(joined.record(7)) == {KEY, "jpg", "txt"}
    assert joined.record(7)[KEY] == "0007"
    with pytest.raises(RecordError, match="no record with this key") as caught:
        JoinedRecords([images, captions])
    assert caught.value.key == "0020"
    with pytest.raises(RecordError, match="two records have this key"):
        JoinedRecords([images, images], keys=[["0", "0"], ["0", "1"]])


def test_a_split_by_hash_keeps_records_in_their_part() -> None:
    few, many = words("a", 500), words("a", 900)
    parts = split_by_hash(few, {"train": 0.9, "test": 0.1})
    assert sum(len(part) for part in parts.values()) == 500
    assert len(parts["test"]) == pytest.approx(50, abs=20)
    later = split_by_hash(many, {"train": 0.9, "test": 0.1})
    assert set(parts["test"].indices.tolist()) <= set(later["test"].indices.tolist())
    assert not set(later["test"].indices.tolist()) & set(later["train"].indices.tolist())
    with pytest.raises(DataError, match="add up to"):
        split_by_hash(few, {"train": 0.9})


def test_groups_have_similar_lengths_within_the_budget() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64)).clip(max=8192)
    groups = group_by_length(lengths, max_tokens=16_384)
    assert sorted(groups.members.tolist()) == list(range(len(lengths)))
    for group in range(0, len(groups), 7):
        members = groups.group(group)
        assert lengths[members].max() * len(members) <= 16_384
    assert groups.fill(lengths) > 0.97
    with pytest.raises(DataError, match="the longest sample has"):
        group_by_length(lengths, max_tokens=100)


def test_workers_are_chosen_from_a_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    loader = open_loader(words("a", 64), batch_samples=8, num_workers="auto")
    assert len(next(loader)) == 8
    assert "per sample" in capfd.readouterr().err
    loader.close()


def test_a_path_is_a_torch_dataset_and_a_loader_in_three_lines(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text(str(number))
    dataset = RecordDataset(tmp_path)
    assert len(dataset) == 12
    loader = open_loader(tmp_path, batch_samples=4, transform=lambda record, _: int(str(record[KEY])[:2]))
    batch = next(loader)
    assert isinstance(batch, torch.Tensor) and batch.shape == (4,)


def test_token_sequences_in_any_loop() -> None:
    spec = DataSpec(synthetic=SyntheticSpec(num_documents=12), sequence_length=64, batch_sequences=12)
    full = TokenLoader(spec, seed=3)
    batches = [next(full) for _ in range(4)]
    assert batches[0].shape == (12, 65)
    assert batches[0].dtype == torch.int64
    ranks = [TokenLoader(spec, seed=3, dp_rank=rank, dp_size=3) for rank in range(3)]
    for rank in ranks:
        rank.restore({**full.state(), "position": 12})
    for step in (1, 2, 3):
        assert torch.equal(torch.cat([next(rank) for rank in ranks]), batches[step])
    with pytest.raises(DataError, match="seed was 3, is 4"):
        TokenLoader(spec, seed=4).restore(full.state())


RECORDS_FILE = """
sources:
  - path: {folder}/images
    join: [{folder}/captions.jsonl]
    missing: skip
    part: {{name: train, shares: {{train: 0.8, test: 0.2}}}}
    weight: 0.7
  - {{path: {folder}/more, weight: 0.3}}
seed: 3
shuffle: {{block_samples: 4, window_blocks: 2}}
"""


def write_records(folder: Path) -> Path:
    """Two folders of files, captions of most of the first one, and a records file of them."""
    for name, count in (("images", 40), ("more", 10)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number:02d}.bin").write_bytes(bytes([number]) * (number + 1))
    keys = [str(record[KEY]) for record in map(RecordDataset(folder / "images").source.record, range(36))]
    lines = [json.dumps({KEY: key, "caption": f"picture {key}"}) for key in keys]
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "records.yaml"
    file.write_text(RECORDS_FILE.format(folder=folder))
    return file


def test_a_records_file_joins_splits_and_blends(tmp_path: Path) -> None:
    file = write_records(tmp_path)
    by_hand = JoinedRecords(
        [open_source(tmp_path / "images"), open_source(tmp_path / "captions.jsonl")], missing="skip"
    )
    train = split_by_hash(by_hand, {"train": 0.8, "test": 0.2})["train"]
    expected = open_loader(
        [train, open_source(tmp_path / "more")],
        batch_samples=8,
        weights=(0.7, 0.3),
        seed=3,
        shuffle=Blocks(4, 2),
    )
    loader = open_loader(file, batch_samples=8)
    assert loader.state() == expected.state()
    assert [next(loader) for _ in range(9)] == [next(expected) for _ in range(9)]
    assert open_loader(file, batch_samples=8, seed=4).state() != loader.state()  # keywords override
    reports = report_records(read_records(file))
    assert [report.num_records for report in reports] == [len(train), 10]
    assert reports[0].line.endswith(f": 70%, {len(train)} records")


def test_check_shows_what_a_records_file_resolves_to(tmp_path: Path) -> None:
    file = write_records(tmp_path)
    file.write_text(f"sources: [{{path: {tmp_path}/more}}]\nmax_tokens: 24\n")
    shown = CliRunner().invoke(app, ["check", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "100%, 10 records" in shown.output and "groups" in shown.output
    facts = json.loads(CliRunner().invoke(app, ["check", str(file), "--json"]).output)
    assert facts["sources"][0]["num_records"] == 10


BAD_FILES = {
    "sources: []": "there is no source",
    "sources: [{path: a, weight: 1}, {path: b}]": "some sources have a weight",
    "sources: [{pathh: a}]": "pathh",
    "sources: [{path: a}]\nnum_workers: some": "num_workers",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_wrong_records_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        open_loader(tmp_path / "r.yaml", batch_samples=4)
    assert BAD_FILES[text] in str(caught.value)
