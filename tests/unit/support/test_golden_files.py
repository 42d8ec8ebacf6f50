"""The golden helper: it compares, and it writes only when the environment says so."""

from pathlib import Path

import pytest
from tests.support import golden_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden_files, "FOLDER", tmp_path)
    monkeypatch.delenv("MESHWRIGHT_GOLDEN", raising=False)
    return tmp_path


def test_a_missing_or_different_file_fails(folder: Path):
    with pytest.raises(AssertionError, match="does not exist"):
        golden_files.assert_golden("a/b.txt", "x")
    (folder / "c.txt").write_text("y")
    with pytest.raises(AssertionError, match="differs"):
        golden_files.assert_golden("c.txt", "x")
    assert (folder / "c.txt").read_text() == "y"


def test_writing_makes_it_pass(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHWRIGHT_GOLDEN", "write")
    golden_files.assert_golden("a/b.txt", "x")
    assert (folder / "a/b.txt").read_text() == "x"
