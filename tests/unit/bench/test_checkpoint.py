"""The checkpoint benchmark leaves the folder of the user as it was."""

import sys
from pathlib import Path

import pytest
from bench import checkpoint


def test_nothing_of_the_user_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "thesis.txt").write_text("of the user")
    monkeypatch.setattr(
        sys, "argv", ["checkpoint", "--work", str(tmp_path), "--megabytes", "1", "--rounds", "1"]
    )
    checkpoint.main()
    assert "| ours: verify and load |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "ours", "thesis.txt"]
