"""Remembered peaks: read back, bounded in number, and none from a file that is damaged."""

from pathlib import Path

import pytest
from tests.support.plans import asked

from meshwright.rehearse.peak_cache import FILE, KEPT, TracedPeak, peak_key, read_peaks, store_peaks


def test_peaks_are_read_back_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    peak = TracedPeak(3, 1e9, 0.0)
    store_peaks({"a": peak}, tmp_path / "new")
    assert read_peaks(tmp_path / "new") == {"a": peak}
    store_peaks({str(index): peak for index in range(KEPT)}, tmp_path / "new")
    assert len(read_peaks(tmp_path / "new")) == KEPT and "a" not in read_peaks(tmp_path / "new")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "b": {"rank": 0}}', '{"a": {"rank": 0, "x": 1}}'])
def test_a_damaged_file_has_no_peaks(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_peaks(tmp_path) == {}


def test_the_key_follows_the_layout_and_not_the_name() -> None:
    run = asked("gpt3-1.3b", "a100:8", seq=2048, batch_tokens=2**20).question.run
    assert peak_key(run) == peak_key(run.with_(name="other"))
    assert peak_key(run) != peak_key(run.with_(memory=run.memory.with_(recompute="full")))
