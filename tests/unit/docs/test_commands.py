"""Every `meshwright ...` on a page for people is a command line that the program accepts.

The command is parsed by the real command line: verb, options, kinds of values. Keys and values of overrides
are read onto a run, models are known families, and clusters are known ones. Nothing is run.
"""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from meshwright.cli.main import UsageError, app
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_cluster
from meshwright.plan.search.pins import parse_pins
from meshwright.spec.families import is_family
from meshwright.spec.text import read_run, recipe_names

ROOT = Path(__file__).parents[3]
FOLDERS = ("guides", "tutorials", "concepts")
PAGES = [
    *(ROOT / name for name in ("README.md", "docs/README.md", "docs/start.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
# A line of a block, with the lines that it continues on, and a command within a sentence.
LINE = re.compile(r"^ *(?:\$ )?(?:torchrun [^\n]*-m )?meshwright ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
INLINE = re.compile(r"`meshwright ([^`\n]+)`")
# What stands for an input of the reader's.
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|FOLDER|.*[/.].*|.*<.*")
WITH_RUN = ("check", "predict", "rehearse", "train", "launch", "export", "show", "bench", "profile")
GROUPS = ("data", "models", "show", "bench", "hardware", "launch")


class Command(NamedTuple):
    """A command of a page."""

    page: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: meshwright {shlex.join(self.arguments)}"


def commands(page: Path) -> list[Command]:
    """The commands of a page that have an argument; usage lines such as `[--data PATH]` are left out."""
    text = page.read_text()
    found = []
    for written in [*LINE.findall(text), *INLINE.findall(text)]:
        line = re.split(r"\s#|\s[|>&]", written.replace("\\\n", " "))[0].strip()
        is_usage = "[" in line or "..." in line or line.endswith(("VERB", ":"))
        words = () if is_usage else tuple(shlex.split(line))
        if len(words) > 2 or (len(words) == 2 and words[0] not in GROUPS):
            found.append(Command(str(page.relative_to(ROOT)), words))
    return found


COMMANDS = sorted({command for page in PAGES for command in commands(page)})


def parsed(arguments: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of a command line, by the parser of its verb."""
    command, rest, context = get_command(app), list(arguments), None
    while True:
        context = command.make_context(command.name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            return context.params
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


def test_pages_have_commands():
    assert len(COMMANDS) > 100
    assert {command.page for command in COMMANDS} >= {
        "README.md",
        "docs/guides/plan.md",
        "docs/tutorials/zero.md",
    }


def accept(arguments: tuple[str, ...]) -> None:
    """Raise where the program would refuse the command line."""
    params, verb = parsed(arguments), arguments[0]
    if verb in WITH_RUN:
        run = params.get("run")
        is_named = run is not None and not PLACEHOLDER.fullmatch(str(run))
        assert not is_named or run in recipe_names()
        overrides = params.get("overrides") or ()
        has_adapter = any(one.startswith("adapter.") for one in overrides)
        unnamed = "llama-3.1-8b-lora-24gb" if has_adapter else "llama-3.1-8b-8gpu"
        read_run(run if is_named else unnamed, overrides)
    if verb == "plan" and not params["calibrate"]:
        parse_pins(params["pins"] or [])
        assert PLACEHOLDER.fullmatch(params["model"]) or is_family(params["model"])
    if params.get("on") and not PLACEHOLDER.fullmatch(params["on"]):
        parse_cluster(params["on"])


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_program_accepts_it(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "DIR").mkdir()
    monkeypatch.chdir(tmp_path)
    accept(command.arguments)


@pytest.mark.parametrize(
    "line",
    [
        "fly run.yaml",
        "bench comm --sizes 1MB",
        "train run.yaml parallel.tpp=2",
        "train run.yaml parallel.tp=two",
        "check llama-9",
        "plan llama-9 --on h100:8",
        "plan llama-3.1-8b --on h100x:8",
        "plan llama-3.1-8b --on h100:8 tpp=2",
        "show schedule --pp four",
    ],
)
def test_a_wrong_command_is_found(line: str):
    with pytest.raises((UsageError, MeshwrightError, AssertionError)):
        accept(tuple(shlex.split(line)))
