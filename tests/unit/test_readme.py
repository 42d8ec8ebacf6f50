"""The README shows what the program prints today, for the commands that take no training."""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from meshwright.cli.main import run

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = dict(re.findall(r"```console\n\$ meshwright ([^\n]+)\n(.*?)```", README, re.DOTALL))
QUICK = [command for command in BLOCKS if command.split()[0] in ("plan", "check")]


def test_the_verbs_are_shown():
    assert [command.split()[0] for command in BLOCKS] == ["plan", "check", "rehearse", "demo"]


@pytest.mark.parametrize("command", QUICK, ids=[command.split()[0] for command in QUICK])
def test_shown_output_is_what_is_printed(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    run(shlex.split(command))
    captured = capsys.readouterr()
    printed = [line.rstrip() for line in (captured.out or captured.err).splitlines()]
    shown = [line.rstrip() for line in takewhile(lambda line: line != "...", BLOCKS[command].splitlines())]
    assert printed[: len(shown)] == shown
