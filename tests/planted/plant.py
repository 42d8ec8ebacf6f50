"""Plants a known mistake in a copy of the source and runs an unmodified test against it."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Bug:
    """A mistake as a replacement of text, and the test that must turn red."""

    name: str
    file: str
    """Below src/meshwright."""
    before: str
    after: str
    test: str
    """As pytest names it."""
    is_wide: bool = False
    """Of a kind that another one stands for in the quick tests: this one is tried in the long ones."""


def plant(bug: Bug, folder: Path) -> Path:
    """A copy of the source with the mistake in it; fails when the text is not there exactly once."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    path = source / "meshwright" / bug.file
    text = path.read_text()
    assert text.count(bug.before) == 1, (
        f"{bug.name}: {bug.file} holds the text {text.count(bug.before)} times; the source has changed, "
        f"so plant the mistake in its new form:\n{bug.before}"
    )
    path.write_text(text.replace(bug.before, bug.after))
    return source


def outcomes(source: Path, tests: list[str]) -> dict[str, bool]:
    """Which of the tests pass (True) or fail (False) with this source; anything else is our own mistake."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--tb=line",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    told = re.findall(r"^(PASSED|FAILED) (\S+)", done.stdout, flags=re.MULTILINE)
    found = {name: verdict == "PASSED" for verdict, name in told}
    assert set(tests) == set(found), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return found
