"""Completion: a script for each shell, and what the program answers to it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("meshwright train llama-3.2", "llama-3.2-1b-1gpu"),
        ("meshwright train recipes/de", "recipes/demo.yaml"),
        ("meshwright check demo parallel.dp_s", "parallel.dp_shard="),
        ("meshwright train demo observe.evaluate.early", "observe.evaluate.early_stopping.patience="),
        ("meshwright train demo data.synthetic.num", "data.synthetic.num_documents="),
        ("meshwright train demo precision.compute=b", "precision.compute=bf16"),
        ("meshwright train demo observe.tensorboard=t", "observe.tensorboard=true"),
        ("meshwright plan llama-3.1-7", "llama-3.1-70b"),
        ("meshwright predict demo --on leo", "leonardo:"),
        ("meshwright show memory demo --on h10", "h100:"),
    ],
)
def test_recipes_families_clusters_and_settings_are_completed(
    words: str, wanted: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setenv(COMPLETE_VARIABLE, "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    assert run([]) == 0
    assert f'"{wanted}"' in capsys.readouterr().out.replace("\\", "")  # zsh wants its colons escaped


def test_a_key_that_was_completed_in_bash_is_followed_by_no_space(tmp_path: Path, capsys: Captured):
    """In bash itself: the function of the script fills COMPREPLY from the program."""
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = "COMP_WORDS=(meshwright train demo parallel.dp_s); COMP_CWORD=3; _meshwright_completion meshwright"
    (tmp_path / "meshwright").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m meshwright "$@"\n')
    (tmp_path / "meshwright").chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", f'{script}\ncompopt() {{ echo "$@"; }}\n{ask}; echo "${{COMPREPLY[@]}}"'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert found.stdout.split("\n")[:2] == ["-o nospace", "parallel.dp_shard="]
