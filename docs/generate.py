"""Writes the generated pages of docs/reference from the program itself: `python docs/generate.py`.

A test compares the committed pages with what this writes, so that they cannot become stale.
"""

import contextlib
import inspect
import io
import os
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.api.questions import check, plan, predict
from meshwright.api.training import train
from meshwright.checkpoint.load_weights import load_weights
from meshwright.cli.main import VERBS, run
from meshwright.data.loader import open_loader
from meshwright.modules.chain import Chain
from meshwright.modules.fit import fit
from meshwright.modules.own_loop import prepare
from meshwright.spec import RunSpec
from meshwright.spec.base import Spec
from meshwright.spec.check import RULES
from meshwright.spec.conditions import CONDITIONS
from meshwright.spec.modules import FitSpec, LoopSpec, SamplesSpec
from meshwright.spec.records import HashPartSpec, RecordSourceSpec, RecordsSpec
from meshwright.spec.rules_modules import FIT_RULES, LOOP_RULES, MODULE_RULES, SHARED_FIT_RULES, SHARED_RULES
from meshwright.spec.violations import spec_of

REFERENCE = Path(__file__).parent / "reference"
EXAMPLE = re.compile(r"<!-- (?P<path>examples/[a-z_]+\.py) -->\n.*?<!-- end -->", re.DOTALL)
GENERATED = "<!-- Written by docs/generate.py; change the program, not this page. -->"


def main() -> None:
    """Write every generated page."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
    for page, text in guides_with_examples().items():
        page.write_text(text)


def guides_with_examples() -> dict[Path, str]:
    """The guides that show an example, with its text as it is today between the marks."""
    found = {page: page.read_text() for page in sorted((REFERENCE.parent / "guides").glob("*.md"))}
    return {page: EXAMPLE.sub(_shown, text) for page, text in found.items() if EXAMPLE.search(text)}


def _shown(match: re.Match[str]) -> str:
    text = (REFERENCE.parents[1] / match["path"]).read_text()
    return f"<!-- {match['path']} -->\n```python\n{text}```\n<!-- end -->"


def pages() -> dict[str, str]:
    """File name -> text of each generated page."""
    return {"cli.md": cli_page(), "python.md": python_page(), "run.md": run_page()}


def python_page() -> str:
    """The functions of the Python interface, with the settings of each."""
    parts = [
        f"# Python\n\n{GENERATED}\n",
        "`plan`, `predict`, `check` and `train` are the verbs of the [command line](cli.md); the "
        "[guide](../guides/python.md) lists what they return.\n",
        "For `prepare` and `fit`, a setting is a keyword: a field of a part by its own name where only one "
        "part has it "
        "(`zero=3`), or a part as a mapping (`parallel={'zero': 3}`). The parts that are not listed are "
        "those of a [run file](run.md).\n",
    ]
    for function in (plan, predict, check, train):
        parts += [
            f"## meshwright.{function.__name__}\n",
            _block(_call(function)),
            f"{inspect.getdoc(function)}\n",
        ]
    for function, spec in ((prepare, LoopSpec), (fit, FitSpec)):
        parts += [f"## meshwright.{function.__name__}\n", _block(_call(function))]
        parts += [f"{inspect.getdoc(function)}\n"]
        parts += ["| setting | kind | default | meaning |\n|---|---|---|---|"]
        parts += [_row("", name, found) for name, found in spec.model_fields.items()]
        parts += [""]
    parts += ["### data\n", "| setting | kind | default | meaning |\n|---|---|---|---|"]
    parts += [_row("data.", name, found) for name, found in SamplesSpec.model_fields.items()]
    parts += [
        "",
        "## meshwright.open_loader\n",
        _block(_call(open_loader)),
        f"{inspect.getdoc(open_loader)}\n",
    ]
    parts += ["### Records file\n", "| setting | kind | default | meaning |\n|---|---|---|---|"]
    for start, spec in (
        ("", RecordsSpec),
        ("sources[].", RecordSourceSpec),
        ("sources[].part.", HashPartSpec),
    ):
        parts += [_row(start, name, found) for name, found in spec.model_fields.items()]
    parts += ["", "## meshwright.load_weights\n", _block(_call(load_weights))]
    parts += [f"{inspect.getdoc(load_weights)}\n"]
    parts += ["## meshwright.Chain\n", f"{inspect.getdoc(Chain)}\n"]
    parts += [f"{line}" for line in inspect.getdoc(inspect.getmodule(Chain)).splitlines()[2:]]
    parts += ["", "## Rules\n", "| rule | says |\n|---|---|"]
    rules = [*MODULE_RULES, *FIT_RULES, *LOOP_RULES, *SHARED_RULES, *SHARED_FIT_RULES]
    parts += [f"| `{rule.__name__}` | {_line(inspect.getdoc(rule))} |" for rule in rules]
    return "\n".join(parts) + "\n"


def _call(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return f"meshwright.{function.__name__}({', '.join(_parameter_text(one) for one in parameters)})"


def _parameter_text(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    empty = parameter.default is inspect.Parameter.empty
    return parameter.name if empty else f"{parameter.name}={parameter.default}"


def cli_page() -> str:
    """Every verb with its help."""
    parts = [f"# Command line\n\n{GENERATED}\n", _block(help_of([]))]
    for verb, summary in VERBS.items():
        parts += [f"## {verb}\n\n{summary}\n", _block(help_of([verb]))]
        parts += [_block(help_of([verb, inner])) for inner in inner_verbs(verb)]
    return "\n".join(parts)


def help_of(words: list[str]) -> str:
    """What `--help` prints, at a width that does not depend on the terminal."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(out):
            run([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue()


def inner_verbs(verb: str) -> list[str]:
    """The verbs inside a verb (`data pack`), read from its help."""
    lines = help_of([verb]).splitlines()
    if "Commands:" not in lines:
        return []
    below = lines[lines.index("Commands:") + 1 :]
    return [line.split()[0] for line in below if line.startswith("  ") and not line.startswith("   ")]


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def run_page() -> str:
    """Every key of a run file, and every rule between them."""
    parts = [
        f"# Run file\n\n{GENERATED}\n",
        "Keys are written nested in a file and dotted on the command line (`parallel.tp=2`). Integers",
        "may be written `4K`, `2M`, `1e6`; sizes `80GiB`; durations `30d`. Besides these keys a file may say",
        "`recipe: NAME`, and `model:` may be a family's name. See [the guide](../guides/run_file.md).\n",
        *_sections("", RunSpec),
        "## Rules\n",
        "`meshwright check` tells every rule that a run breaks.\n",
        "| rule | says |\n|---|---|",
        *(f"| `{rule.__name__}` | {_line(inspect.getdoc(rule))} |" for rule in RULES),
        "\n### Settings that need others\n",
        "| key | has an effect when |\n|---|---|",
        *(f"| `{condition.key}` | {condition.text} |" for condition in CONDITIONS),
    ]
    return "\n".join(parts) + "\n"


def _sections(prefix: str, spec: type[Spec]) -> list[str]:
    """A table per spec, each followed by the tables of the specs inside it."""
    title = f"## {prefix.rstrip('.')}\n" if prefix else "## Top level\n"
    rows = [_row(prefix, name, found) for name, found in spec.model_fields.items()]
    lines = [
        title,
        f"{_line(spec.__doc__)}\n",
        "| key | value | default | meaning |\n|---|---|---|---|",
        *rows,
        "",
    ]
    for name, found in spec.model_fields.items():
        below = spec_of(found)
        if below is not None:
            lines += _sections(f"{prefix}{name}.", below)
    return lines


def _row(prefix: str, name: str, found: FieldInfo) -> str:
    default = "required" if found.is_required() else _default(found.default)
    meaning = _line(found.description).replace("<", "&lt;")  # not a tag of HTML
    return f"| `{prefix}{name}` | {_kind(found)} | {default} | {meaning} |"


def _default(value: Any) -> str:
    if isinstance(value, Spec):
        return "see below"
    if value == ():
        return "empty"
    if value is None or isinstance(value, bool):
        return "absent" if value is None else str(value).lower()
    return f"`{value}`"


def _kind(found: FieldInfo) -> str:
    if spec_of(found) is not None and get_origin(found.annotation) is tuple:
        return "list of mappings"
    is_union = get_origin(found.annotation) in (Union, types.UnionType)
    options = get_args(found.annotation) if is_union else (found.annotation,)
    return ", ".join(_word(option) for option in options if option is not type(None))


def _word(option: Any) -> str:
    if get_origin(option) is Literal:
        return " ".join(f"`{word}`" for word in get_args(option))
    if get_origin(option) is tuple:
        return f"list of {_word(get_args(option)[0])}"
    if isinstance(option, type) and issubclass(option, Spec):
        return "mapping"
    plain = get_args(option)[0] if get_origin(option) is Annotated else option
    if get_origin(plain) is dict:
        return "mapping"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[plain]


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
