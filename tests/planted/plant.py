"""Plants a known bug in a copy of the source and runs an unmodified test against it."""

import ast
import builtins
import re
import shutil
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.planted.trial_server import ROOT, TrialServer


@dataclass(frozen=True)
class Bug:
    """A bug as a replacement of text, and the test that must turn red."""

    name: str
    file: str
    """The changed file, below src/meshwright."""
    before: str
    after: str
    test: str
    """The test that must fail, as pytest names it."""
    is_wide: bool = False
    """A similar bug is tried in `make test`; this one is tried in `make soak` only."""


def planted_text(bug: Bug, source: Path) -> str:
    """The changed file's text; fails when the text to replace is not there exactly once."""
    text = (source / "meshwright" / bug.file).read_text()
    assert text.count(bug.before) == 1, (
        f"{bug.name}: {bug.file} holds the text {text.count(bug.before)} times; the source has changed, "
        f"so plant the bug in its new form:\n{bug.before}"
    )
    return text.replace(bug.before, bug.after)


def new_names(bug: Bug) -> set[str]:
    """Names that the bug uses and the file neither knows nor assigns: the bug would only be a NameError."""
    planted = list(ast.walk(ast.parse(planted_text(bug, ROOT / "src"))))
    original = ast.walk(ast.parse((ROOT / "src/meshwright" / bug.file).read_text()))
    known = {node.id for node in original if isinstance(node, ast.Name)} | set(dir(builtins))
    assigned = {node.id for node in planted if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.id for node in planted if isinstance(node, ast.Name)} - known - assigned


def plant(bug: Bug, folder: Path) -> Path:
    """A copy of the source with the bug in it."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source)  # with compiled files, which stay valid: copies keep their times
    path = source / "meshwright" / bug.file
    path.write_text(planted_text(bug, source))
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    return source


def outcomes(
    server: TrialServer, source: Path, tests: list[str], *, includes_soak: bool = False
) -> dict[str, bool]:
    """Test -> whether it passes with this source; any other outcome is an error of the trial itself.

    Only with `includes_soak` may it be a test of `make soak`.
    """
    output = server.run(source, [*tests, *([] if includes_soak else ["-m", "not soak"])])
    found = re.findall(r"^(PASSED|FAILED) (\S+)", output, flags=re.MULTILINE)
    passed = {name: verdict == "PASSED" for verdict, name in found}
    assert set(tests) == set(passed), output[-6000:]
    return passed
