"""The guide to the shared test code names every file of it."""

from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"


def test_every_file_is_named():
    text = (SUPPORT / "README.md").read_text()
    assert [path.name for path in SUPPORT.glob("*.py") if path.stem not in text] == []
