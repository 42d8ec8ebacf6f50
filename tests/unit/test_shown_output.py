"""The README and the guides show what the program prints today, for commands that take a few seconds.

`...` stands for anything within a line, and as a line of its own for the rest of the output.
"""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.data.corpus import document_text

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"```(?:console)?\n\$ meshwright ([^\n]+)\n(.*?)```", re.DOTALL)
INDENTED = re.compile(r"^    \$ meshwright ([^\n]+)\n((?:    [^\n]*\n)+)", re.MULTILINE)


def shown(page: str) -> list[tuple[str, list[str]]]:
    """(command, lines) of every command whose output a page shows."""
    text = (ROOT / page).read_text()
    fenced = [(command, output.splitlines()) for command, output in FENCED.findall(text)]
    indented = [
        (command, [line[4:] for line in output.splitlines()]) for command, output in INDENTED.findall(text)
    ]
    return fenced + indented


def quick(page: str) -> list[tuple[str, list[str]]]:
    return [(command, lines) for command, lines in shown(page) if command.split()[0] in ("plan", "check")]


CASES = [*quick("README.md"), *quick("docs/guides/plan.md")]


def test_the_readme_shows_the_verbs():
    assert [command.split()[0] for command, _ in shown("README.md")] == ["plan", "check", "rehearse", "demo"]


@pytest.mark.parametrize(("command", "lines"), CASES, ids=[command for command, _ in CASES])
def test_shown_output_is_what_is_printed(command, lines, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    compare(output_of(command, capsys), list(takewhile(lambda line: line != "...", lines)))


def test_the_guide_to_data_shows_what_is_printed(capsys, monkeypatch, tmp_path):
    """On 3,000 stories of the generated corpus; `...` as the first line is all output up to the next one."""
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    stories = (document_text(seed=0, index=index) for index in range(3000))
    Path("books/stories.txt").write_text("\n\n".join(stories))
    commands = [(command, lines) for command, lines in shown("docs/guides/data.md") if "stories" in command]
    assert [command.split()[1] for command, _ in commands] == ["pack", "inspect", "stats"]
    for command, lines in commands:
        printed = output_of(command, capsys)
        if lines[0] == "...":
            lines = lines[1:]
            printed = printed[printed.index(lines[0]) :]
        compare(printed, lines)


def output_of(command: str, capsys) -> list[str]:
    """The lines that a command prints."""
    run(shlex.split(command))
    captured = capsys.readouterr()
    return [line.rstrip() for line in (captured.out or captured.err).splitlines()]


def compare(printed: list[str], wanted: list[str]) -> None:
    """The first lines that are printed are those that the page shows."""
    for found, line in zip(printed, wanted, strict=False):
        pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, found), f"{found!r} is shown as {line!r}"
    assert len(printed) >= len(wanted)
