"""A config file of another framework as a run."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from meshwright.configs.accelerate import read_accelerate
from meshwright.configs.deepspeed import read_deepspeed
from meshwright.configs.entries import Entry
from meshwright.configs.megatron import parse_arguments, read_megatron
from meshwright.configs.mesh_settings import complete_settings
from meshwright.configs.rules import Settings, Translation
from meshwright.configs.torchtitan import read_torchtitan
from meshwright.errors import SpecError, SpecErrors, read_trouble
from meshwright.spec.run import RunSpec
from meshwright.spec.text import find_run_file, load_run, parse_run
from meshwright.spec.yaml_text import dump_yaml, parse_yaml

FormatName = Literal["accelerate", "deepspeed", "torchtitan", "megatron"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
_LARGEST_BYTES = 2**20
_OF_SUFFIX: dict[str, FormatName] = {
    **dict.fromkeys((".yaml", ".yml"), "accelerate"),
    **dict.fromkeys((".sh", ".txt", ".args"), "megatron"),
    ".json": "deepspeed",
    ".toml": "torchtitan",
}


@dataclass(frozen=True)
class Imported:
    """A run made from a config file, with an entry for each key of the file."""

    form: FormatName
    entries: tuple[Entry, ...]
    settings: Settings
    """The dotted keys that the file sets."""
    num_ranks: int | None
    """Ranks that the file, or the caller, says."""


def read_config(
    path: Path,
    form: str | None = None,
    *,
    base: RunSpec | None = None,
    num_ranks: int | None = None,
    num_nodes: int | None = None,
) -> Imported:
    """Read a config file; `num_ranks` and `num_nodes` are used where given, instead of the file's."""
    text = _read_text(path)
    chosen = _format_of(path, text, form)
    found = _translation(chosen, text, path)
    given = {"ranks": num_ranks, "nodes": num_nodes}
    found.facts.update({name: value for name, value in given.items() if value is not None})
    settings = complete_settings(found, base)
    return Imported(chosen, tuple(found.entries), settings, found.facts.get("ranks"))


def imported_run(imported: Imported, overrides: list[str], *, onto: str | None, place: str) -> RunSpec:
    """The run: the base run, then the file, then overrides; SpecErrors where it is incomplete or wrong."""
    tree = settings_tree(imported.settings)
    if onto is not None:
        tree = {"recipe": str(find_run_file(onto).resolve()), **tree}
    try:
        return parse_run(
            dump_yaml(tree or {"version": 2}), overrides, place=f"import of {place}"
        ).require_valid()
    except SpecError as error:
        violations = error.violations if isinstance(error, SpecErrors) else [error]
        if onto is None and any(each.fact.endswith("is missing") for each in violations):
            hint = (
                f"{imported.form} files do not say it: use --onto RUN, or set it, such as model=llama-3.1-8b"
            )
            raise SpecErrors(
                [
                    SpecError(e.fact, where=e.where, hint=hint if e.fact.endswith("is missing") else e.hint)
                    for e in violations
                ]
            ) from None
        raise


def base_run(onto: str | None) -> RunSpec | None:
    """The run that the file's values are put on top of."""
    return load_run(onto) if onto is not None else None


def settings_tree(settings: Settings) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        *parents, name = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = dict(cast(dict[str, Any], value)) if isinstance(value, dict) else value
    return tree


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise SpecError("this is larger than 1 MiB", where=str(path), hint="is it a config file?")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the file cannot be read: {read_trouble(error)}", where=str(path)) from None


def _format_of(path: Path, text: str, form: str | None) -> FormatName:
    if form is not None:
        if form not in FORMATS:
            raise SpecError(f"there is no format {form!r}", where="--from", hint=", ".join(FORMATS))
        return form
    if path.suffix == ".json" and '"compute_environment"' in text:
        return "accelerate"
    found = _OF_SUFFIX.get(path.suffix.lower())
    if found is None:
        hint = f"name its format with --from: {', '.join(FORMATS)}"
        raise SpecError(f"the format of {path.name} is not known by its ending", where=str(path), hint=hint)
    return found


def _translation(form: FormatName, text: str, path: Path) -> Translation:
    if form == "megatron":
        return read_megatron(parse_arguments(text, place=str(path)))
    if form == "torchtitan":
        return read_torchtitan(_mapping(_parse_toml(text, path), path))
    tree = _mapping(_parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path), path)
    return read_deepspeed(tree) if form == "deepspeed" else read_accelerate(tree, path.parent)


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"this is not TOML: {error}", where=str(path)) from None


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"this is not JSON: {error}", where=str(path)) from None


def _parse_yaml(text: str, path: Path) -> Any:
    parsed = parse_yaml(text, str(path))
    if parsed.violations:
        raise SpecErrors(parsed.violations)
    return parsed.value


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise SpecError(
            "this is not a mapping of keys to values", where=str(path), hint="is it a config file?"
        )
    return cast(dict[str, Any], value)
