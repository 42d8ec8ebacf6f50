"""Completion: a script for each shell, and what the program answers to it."""

import shutil
import subprocess

import pytest

from meshwright.cli.main import COMPLETE_VARIABLE, run

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_the_program(shell: str, capsys: Captured):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETE_VARIABLE}=complete_{shell}" in script and "meshwright" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_another_shell_is_refused(capsys: Captured):
    assert run(["completion", "tcsh"]) == 2
    assert "none of bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"": "complete_bash", "COMP_WORDS": "meshwright tr", "COMP_CWORD": "1"}, "train"),
        ({"": "complete_bash", "COMP_WORDS": "meshwright train --st", "COMP_CWORD": "2"}, "--stop-after"),
        ({"": "complete_zsh", "_TYPER_COMPLETE_ARGS": "meshwright data p"}, "pack"),
        (
            {
                "": "complete_fish",
                "_TYPER_COMPLETE_ARGS": "meshwright eval",
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            },
            "evaluate",
        ),
    ],
    ids=["verb", "option", "zsh", "fish"],
)
def test_verbs_and_options_are_completed(
    variables: dict[str, str], wanted: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name or COMPLETE_VARIABLE, value)
    assert run([]) == 0
    assert wanted in capsys.readouterr().out
