"""Lengths of documents: from the ends in a packed dataset, or assumed."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.workload import documents as module
from meshwright.plan.workload.documents import DocumentLengths, assumed_documents, documents_of
from meshwright.spec.data import DataSpec

SEQUENCE = 64


def _write(folder: Path, lengths: list[int]) -> DataSpec:
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    ends.tofile(folder / "documents.bin")
    return DataSpec(path=str(folder), sequence_length=SEQUENCE, batch_sequences=1)


def _found(data: DataSpec) -> DocumentLengths:
    found = documents_of(data)
    assert found is not None
    return found


def _pairs_per_token(lengths: list[int], length: int) -> float:
    """The mean of (position in its document + 1/2), token by token."""
    ends = np.cumsum(lengths)
    total, begin = 0.0, 0
    for row in range(int(ends[-1])):
        if row % length == 0 or row in ends:
            begin = row
        total += row - begin + 0.5
    return total / int(ends[-1])


def test_keys_seen_are_those_of_every_token(tmp_path: Path) -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 150, size=60)]
    found = _found(_write(tmp_path, lengths))
    assert found.keys_seen(None) == pytest.approx(_pairs_per_token(lengths, SEQUENCE), rel=1e-9)
    assert found.mean_tokens == pytest.approx(np.mean(lengths))
    assert str(tmp_path) in found.source


def test_long_documents_are_split_by_sequences(tmp_path: Path) -> None:
    found = _found(_write(tmp_path, [SEQUENCE * 10]))
    assert found.keys_seen(None) == pytest.approx(SEQUENCE / 2)
    assert found.keys_seen(8) < 8


def test_a_sampled_dataset_is_close_to_the_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [int(n) for n in np.random.default_rng(1).lognormal(3.0, 1.0, size=40000) + 1]
    full = _found(_write(tmp_path, lengths)).keys_seen(None)
    monkeypatch.setattr(module, "MOST_DOCUMENTS", 1 << 13)
    module._read_documents.cache_clear()
    assert _found(_write(tmp_path, lengths)).keys_seen(None) == pytest.approx(full, rel=0.05)


def test_whole_documents_are_not_cut(tmp_path: Path) -> None:
    data = _write(tmp_path, [50] * 64)
    assert _found(data.with_(packing="whole")).keys_seen(None) == pytest.approx(25)
    assert _found(data).keys_seen(None) < 25
    long = _write(tmp_path, [SEQUENCE * 3 + 10]).with_(packing="whole")
    assert _found(long).lengths == (10.0, float(SEQUENCE))


def test_a_blend_has_the_documents_of_its_datasets(tmp_path: Path) -> None:
    for name, length in (("short", 4), ("long", 32)):
        (tmp_path / name).mkdir()
        _write(tmp_path / name, [length] * 512)
    parts = [{"path": str(tmp_path / name), "weight": weight} for name, weight in (("short", 3), ("long", 1))]
    data = DataSpec.model_validate({"blend": parts, "sequence_length": SEQUENCE, "batch_sequences": 1})
    found = _found(data)
    assert found.keys_seen(None) == pytest.approx(0.75 * 2 + 0.25 * 16)
    assert found.mean_tokens == pytest.approx(1 / (0.75 / 4 + 0.25 / 32))
    assert str(tmp_path / "long") in found.source
    parts[0]["path"] = str(tmp_path / "absent")
    assert _found(data.with_(blend=parts)).source == ""


def test_without_a_dataset_lengths_are_assumed(tmp_path: Path) -> None:
    data = DataSpec(path=str(tmp_path / "none"), sequence_length=4096, batch_sequences=1)
    found = _found(data)
    assert found is assumed_documents(4096)
    assert not found.source
    assert found.mean_tokens == 512
    # Half of a sequence would be 2048; the token's own document is longer than the mean one.
    assert 400 < found.keys_seen(None) < 650
    assert documents_of(data.with_(documents="joined")) is None


def test_the_slowest_rank_of_cp_has_more_pairs_the_more_ranks_there_are() -> None:
    found = assumed_documents(32768)
    slowest = found.slowest_rank(np.array([1, 2, 4, 8, 16]))
    assert slowest[0] == 1.0
    assert (np.diff(slowest) > 0).all()
    assert slowest[-1] < 16
    assert (found.slowest_rank(np.array([2, 4, 8]), 4) < slowest[1:4]).all()


def test_equal_documents_are_balanced(tmp_path: Path) -> None:
    """Documents that fill whole chunks give every rank the same work."""
    found = _found(_write(tmp_path, [8] * 64))
    np.testing.assert_allclose(found.slowest_cp[:3], 1.0)
