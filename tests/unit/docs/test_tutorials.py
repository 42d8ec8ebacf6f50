"""The tutorials run on the ranks they name, and print what they show; their pictures are what is drawn."""

import importlib
import re
import shlex
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest
from docs.run_page import Block, difference, read_page, run_on, script, with_printed

from meshwright.cli.main import run

ROOT = Path(__file__).parents[3]
TUTORIALS = ROOT / "docs/tutorials"
PAGES = sorted(page for page in TUTORIALS.glob("*.md") if page.name != "README.md")
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
CONSOLE = re.compile(r"```console\n\$ meshwright ([^\n]+)\n(.*?)```", re.DOTALL)
WITH_COMMANDS = [page for page in PAGES if CONSOLE.search(page.read_text())]


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/draw_tutorials.py, as the script that it is."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("draw_tutorials")


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_blocks_print_what_the_page_shows(ranks, tmp_path, page: Path):
    read = read_page(page)
    printed = run_on(ranks, read, tmp_path)
    shown = [difference(block, output) for block, output in zip(read.blocks, printed, strict=True)]
    assert [text for text in shown if text] == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_print_what_the_page_shows(capsys, monkeypatch, tmp_path, page: Path):
    """In one folder, in order. Numbers agree within 25%; a line `...` is the rest of the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for command, output in CONSOLE.findall(page.read_text()):
        run(shlex.split(command))
        captured = capsys.readouterr()
        printed = [line.rstrip() for line in (captured.out or captured.err).splitlines()]
        wanted = [line.rstrip() for line in takewhile(lambda line: line != "...", output.splitlines())]
        assert wanted and len(printed) >= len(wanted), command
        for found, line in zip(printed, wanted, strict=False):
            assert difference(Block("", line, "prints, within 25%", (0, 0)), found) is None, (
                command,
                found,
                line,
            )


def test_every_page_says_how_to_run_it_and_what_it_teaches():
    for page in WITH_CODE:
        text = page.read_text()
        assert f"`python docs/run_page.py docs/tutorials/{page.name}` runs" in text, page.name
        assert "## What Meshwright does for you" in text or ", with Meshwright" in text, page.name


def test_pictures_are_what_the_script_draws(drawing: ModuleType):
    drawn = drawing.pictures()
    for name, text in drawn.items():
        path = TUTORIALS / "pictures" / name
        assert path.read_text() == text, f"{name}: run `python docs/draw_tutorials.py`, look at it"
    shown = "".join(page.read_text() for page in PAGES)
    assert [name for name in drawn if f"(pictures/{name})" not in shown] == []


@pytest.mark.parametrize(
    ("comparison", "wanted", "found", "agrees"),
    [
        ("prints", "loss 1.0\n", "loss 1.0\n", True),
        ("prints", "loss 1.0\n", "loss 1.1\n", False),
        ("prints", "loss ...\n", "loss 1.1\n", True),
        ("prints", "loss 1.0\n", "loss 1.0\nmore\n", False),
        ("prints, within 5%", "loss 1.00\n", "loss 1.04\n", True),
        ("prints, within 5%", "loss 1.00\n", "loss 1.06\n", False),
        ("prints, within 5%", "agrees: True, 10,000\n", "agrees: False, 10,000\n", False),
        ("prints something like", "1,000 bytes: 13 us\n", "1,000 bytes:  9 us\n", True),
        ("prints something like", "1,000 bytes: 13 us\n", "1,000 bytes: 13 ms\n", False),
    ],
)
def test_comparison(comparison, wanted, found, agrees):
    assert (difference(Block("", wanted, comparison, (0, 0)), found) is None) is agrees


def test_a_page_as_a_script_and_with_new_output(tmp_path):
    page = tmp_path / "page.md"
    text = '# Page\n\n```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text title="prints"\nold\n```\n'
    page.write_text(text)
    read = read_page(page)
    assert script(read) == "x = 1\n\nprint(x)\n" and read.num_ranks == 1
    assert read.blocks[1].code.count("\n", 0, read.blocks[1].code.index("print")) == 7  # its line in the page
    assert with_printed(text, read, ["", "1\n"]) == text.replace("old", "1")
