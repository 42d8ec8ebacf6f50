"""Golden files: text that changes only on purpose.

Regenerate with `MESHWRIGHT_GOLDEN=write python -m pytest tests/golden tests/unit/spec tests/unit/cli`
and read the difference before committing it.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compare with `tests/golden/<name>`, or write it when MESHWRIGHT_GOLDEN=write."""
    path = FOLDER / name
    if os.environ.get("MESHWRIGHT_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} does not exist; MESHWRIGHT_GOLDEN=write creates it"
    expected = path.read_text()
    assert text == expected, f"{path} differs; if that is meant, MESHWRIGHT_GOLDEN=write and read the diff"
