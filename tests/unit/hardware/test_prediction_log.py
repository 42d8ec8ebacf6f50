"""Pairs of predicted and measured values: logged per machine, reported per device, never fatal."""

from dataclasses import replace

import pytest

from meshwright.hardware.prediction_log import (
    FILE,
    KEPT,
    Pair,
    machine_folder,
    observed_line,
    read_pairs,
    store_pair,
)

PAIR = Pair(
    device="h200",
    model="llama-3.2-1b",
    layout="one device",
    num_ranks=1,
    precision="bf16",
    predicted_bytes=61.2 * 2**30,
    measured_bytes=61.5 * 2**30,
    predicted_seconds=0.93,
    measured_seconds=0.97,
)


def test_the_line_of_a_pair():
    assert PAIR.line == "predicted 61.2 GiB, 930 ms; measured 61.5 GiB, 970 ms"


def test_pairs_come_back_by_device(tmp_path):
    store_pair(PAIR, tmp_path)
    store_pair(replace(PAIR, device="a100-80gb"), tmp_path)
    store_pair(replace(PAIR, measured_seconds=1.0), tmp_path)
    assert read_pairs("h200", tmp_path) == [PAIR, replace(PAIR, measured_seconds=1.0)]
    assert read_pairs("b200", tmp_path) == []


def test_only_the_newest_are_kept(tmp_path):
    for seconds in range(1, KEPT + 4):
        store_pair(replace(PAIR, measured_seconds=float(seconds)), tmp_path)
    kept = read_pairs("h200", tmp_path)
    assert (len(kept), kept[0].measured_seconds, kept[-1].measured_seconds) == (KEPT, 4.0, KEPT + 3.0)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"device": "h200"}', '{"device": 3, "predicted_bytes": -1}']
)
def test_damaged_lines_are_passed_over(tmp_path, line):
    store_pair(PAIR, tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    assert read_pairs("h200", tmp_path) == [PAIR]


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert store_pair(PAIR, tmp_path / "file" / "below") is None


def test_the_ratio_is_a_median(tmp_path):
    pairs = [replace(PAIR, measured_seconds=0.93 * ratio) for ratio in (1.0, 1.1, 9.0)]
    line = observed_line(pairs, "h200")
    assert line == (
        "observed on h200: 3 runs here needed 1.00 x the predicted memory "
        "and 1.10 x the predicted time (median)"
    )
    assert observed_line([], "h200") is None


def test_where_pairs_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    assert machine_folder() == tmp_path
    monkeypatch.delenv("MESHWRIGHT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_folder() == tmp_path / "meshwright"
