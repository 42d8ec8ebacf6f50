"""Run files and overrides to a `RunSpec`, and back. Precedence: recipe < file < command line.

A run file is YAML. `recipe: NAME` makes it override a recipe; `model: NAME` starts from a family or from a
Hugging Face folder or `config.json`; `model: {family: NAME, num_layers: 4}` also changes fields of it.
The place where each value was set is recorded, and all errors are reported at once.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

import meshwright
from meshwright.errors import MeshwrightError, SpecError, SpecErrors
from meshwright.files import read_text
from meshwright.spec.check import check
from meshwright.spec.families import FAMILIES, is_family
from meshwright.spec.huggingface import load_model, model_at
from meshwright.spec.modules import FitSpec
from meshwright.spec.origin import Layer, Origin, layer_of
from meshwright.spec.renamed import renamed_in
from meshwright.spec.run import RUN_VERSION, RunSpec
from meshwright.spec.violations import nearest, placed, show_value, violations_of
from meshwright.spec.yaml_text import Parsed, dump_yaml, parse_yaml, walk

_LARGEST_FILE_BYTES = 2**20
_DEEPEST_RECIPE = 8
COMMAND_LINE = Origin("command line")


@dataclass(frozen=True)
class LoadedRun:
    """A run and where each of its values was set."""

    run: RunSpec
    layer: Layer
    """The values that were set, without defaults."""

    def origins(self) -> dict[str, Origin]:
        """The origin of every value of the run, by dotted key."""
        paths = [path for path, _ in walk(self.run.model_dump(mode="json"))]
        default = Origin("default")
        known = {path: self.layer.origin_of(path) for path in paths if self.layer.has(path)}
        return {".".join(map(str, path)): known.get(path, default) for path in paths}

    def require_valid(self) -> RunSpec:
        """The run, if no rule is broken; otherwise SpecErrors with every broken rule and its line."""
        violations = [self._located(violation) for violation in check(self.run)]
        if violations:
            raise SpecErrors(violations)
        return self.run

    def _located(self, violation: SpecError) -> SpecError:
        origin = self.layer.origin_of(tuple(violation.where.split(".")))
        return SpecError(violation.fact, where=placed(violation.where, origin), hint=violation.hint)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run of a file (or recipe name) with overrides, with every rule checked."""
    return read_run(path, overrides).require_valid()


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Like `load_run`, with the origin of each value and without the cross-field rules."""
    file = find_run_file(str(path))
    kind = "recipe" if file.parent in recipe_folders() else "file"
    return _resolve(_read_text(file), file, kind, overrides)


def parse_run(text: str, overrides: Sequence[str] = (), *, place: str = "run.yaml") -> LoadedRun:
    """Like `read_run`, for the text of a run file; `place` is its name in errors."""
    return _resolve(text, Path(place), "file", overrides)


def dump_run(run: RunSpec | FitSpec) -> str:
    """The complete run as YAML, which loads to an equal run even if defaults and families change later."""
    header = (
        f"# {run.name}: every value of the run, resolved by meshwright {meshwright.__version__}.\n"
        f"# fingerprint {run.fingerprint()}\n"
    )
    return header + dump_yaml(run.model_dump(mode="json"))


def recipe_folders() -> list[Path]:
    """Folders in which recipes are looked up by name: ./recipes, beside the source, and as installed."""
    source = Path(__file__).resolve().parents[3] / "recipes"
    return [Path("recipes").resolve(), source, Path(sys.prefix) / "share/meshwright/recipes"]


def recipe_names() -> list[str]:
    """Names of the recipes that can be used without a path."""
    return sorted({file.stem for folder in recipe_folders() for file in folder.glob("*.yaml")})


def find_run_file(name: str, *, beside: Path | None = None) -> Path:
    """The file that a path or a recipe's name means."""
    direct = [beside / name, Path(name)] if beside else [Path(name)]
    named = [folder / f"{name}.yaml" for folder in recipe_folders()] if Path(name).name == name else []
    for file in (*direct, *named):
        if _exists(file) and file.is_file():
            return file
    raise _not_found(name)


def _exists(path: Path) -> bool:
    """Whether a path exists; False for names that no file can have (too long), where pathlib raises."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _not_found(name: str) -> SpecError:
    path = Path(name)
    if not name.strip():
        return SpecError("the name of the run file is empty", where="RUN", hint="name a run file or a recipe")
    if _exists(path) and path.is_dir():
        inner = path / "run.yaml"
        hint = f"did you mean {str(inner)!r}?" if inner.is_file() else "name a run file"
        return SpecError(f"{name!r} is a folder", where=name, hint=hint)
    if name == "-" or (_exists(path) and not path.is_file()):
        fact = "a run is read from a file: standard input and pipes can be read once, and every rank reads it"
        return SpecError(fact, where=name, hint="save the run to a file, such as run.yaml")
    siblings = [str(file) for file in path.parent.glob("*.y*ml")] if _exists(path.parent) else []
    hint = nearest(name, [*siblings, *recipe_names()])
    return SpecError(
        f"there is no file {show_value(name)}",
        where=show_value(name).strip("'"),
        hint=hint or f"recipes: {', '.join(recipe_names())}",
    )


def _read_text(file: Path) -> str:
    try:
        return read_text(file, max_bytes=_LARGEST_FILE_BYTES)
    except OSError as error:
        raise SpecError(
            f"cannot be read: {error.strerror}", where=str(file), hint="name a run file"
        ) from None
    except UnicodeDecodeError as error:
        fact = f"byte {error.start} is not UTF-8"
        raise SpecError(fact, where=str(file), hint="save the file as UTF-8 text") from None


class _Resolution:
    """The merged layers, from the lowest up, and all violations found in them."""

    def __init__(self) -> None:
        self.merged = Layer()
        self.violations: list[SpecError] = []
        self._missing_models: list[SpecError] = []

    def override(self, layer: Layer, folder: Path) -> None:
        """Merge one more layer on top; one that names a family replaces the model."""
        try:
            family = _family_of(layer, folder)
        except MeshwrightError as error:
            origin = layer.origin_of(("model",))
            where = placed("model", origin)
            self._missing_models.append(SpecError(error.fact, where=where, hint=error.hint))
            self.violations.append(self._missing_models[-1])
            family, layer = None, layer.without(("model",))
        if family is not None:
            # It replaces one that is not there too, such as a folder of another machine.
            self.violations = [each for each in self.violations if each not in self._missing_models]
            self.merged = self.merged.without(("model",)).overridden_by(family)
            layer = _without_name(layer)
        self.merged = self.merged.overridden_by(layer)

    def finish(self) -> LoadedRun:
        """The validated run; SpecErrors with every violation otherwise."""
        model_failed = any(violation.where.endswith("model") for violation in self.violations)
        try:
            run = RunSpec.model_validate(self.merged.tree)
        except ValidationError as error:
            _require_tokens(self.merged)
            found = violations_of(error, RunSpec, self.merged)
            self.violations += [each for each in found if not (model_failed and "model" in each.where)]
            self.violations += _unknown_family(self.merged, found)
            raise SpecErrors(self.violations) from None
        if self.violations:
            raise SpecErrors(self.violations)
        return LoadedRun(run, self.merged)


def _require_tokens(layer: Layer) -> None:
    """Refuse the run file of `meshwright.fit` in one text: it has samples and no model."""
    data = layer.tree.get("data")
    if "model" not in layer.tree and isinstance(data, dict) and "batch_samples" in data:
        raise SpecError(
            "this is a run of meshwright.fit, whose model and dataset are Python objects",
            where=placed("data.batch_samples", layer.origin_of(("data", "batch_samples"))),
            hint="start the program that calls fit; `report` and `compare` read its run directory",
        )


def _resolve(text: str, file: Path, kind: str, overrides: Sequence[str]) -> LoadedRun:
    resolution = _Resolution()
    layers, resolution.violations = _command_layers(overrides)
    recipes = [layer.tree.pop("recipe") for layer in layers if "recipe" in layer.tree]
    recipe = recipes[-1] if recipes else None
    _add_file(resolution, text, file, kind=kind, recipe=recipe, depth=0)
    for layer in layers:
        resolution.override(layer, Path())
    return resolution.finish()


def _add_file(
    resolution: _Resolution, text: str, file: Path, *, kind: str, recipe: object, depth: int
) -> None:
    """Merge the recipe that a file names, and then the file."""
    layer, violations = _file_layer(text, str(file), kind)
    recipe_of_file = layer.tree.pop("recipe", None)
    name = recipe or recipe_of_file
    if name is not None:
        origin = COMMAND_LINE if recipe else layer.origin_of(("recipe",))
        _add_recipe(resolution, name, origin, file.parent, depth)
    resolution.violations += violations
    resolution.override(layer, file.parent)


def _add_recipe(resolution: _Resolution, name: object, origin: Origin, folder: Path, depth: int) -> None:
    where = placed("recipe", origin)
    if not isinstance(name, str):
        raise SpecError(f"recipe is {show_value(name)}, not a name", where=where)
    if depth >= _DEEPEST_RECIPE:
        raise SpecError(f"more than {_DEEPEST_RECIPE} recipes are nested", where=where)
    try:
        file = find_run_file(name, beside=folder)
    except SpecError as error:
        raise SpecError(error.fact, where=where, hint=error.hint) from None
    _add_file(resolution, _read_text(file), file, kind="recipe", recipe=None, depth=depth + 1)


def _file_layer(text: str, place: str, kind: str) -> tuple[Layer, list[SpecError]]:
    parsed = parse_yaml(text, place)
    if parsed.value is None:
        raise SpecError("this file is empty", where=place, hint="`meshwright schema` lists the keys of a run")
    if not isinstance(parsed.value, dict):
        fact = f"this is {show_value(parsed.value)}, not a mapping of keys to values"
        raise SpecError(fact, where=place, hint="a run file begins with lines like `model: llama-3.2-1b`")
    tree = cast(dict[str, Any], parsed.value)
    origins = {
        path: Origin("recipe" if kind == "recipe" else "file", f"{place}:{line}")
        for path, line in parsed.lines.items()
    }
    require_version(tree, place)
    return Layer(tree, origins), parsed.violations


def require_version(tree: dict[str, Any], place: str) -> None:
    """Refuse a run file of another version; an older one with the new names of the keys that it contains."""
    version, where = tree.get("version", RUN_VERSION), f"{place} version"
    if version is True or version not in (1, RUN_VERSION):
        hint = f"this is meshwright {meshwright.__version__}, which reads version {RUN_VERSION}"
        raise SpecError(f"version is {show_value(version)}, which is not known", where=where, hint=hint)
    if version == 1:
        renamed = "; ".join(renamed_in(tree))
        fact = f"version is 1, and meshwright {meshwright.__version__} reads version {RUN_VERSION}"
        changes = f"rename its keys ({renamed}) and set" if renamed else "none of its keys changed: set"
        raise SpecError(fact, where=where, hint=f"{changes} version: {RUN_VERSION}")


def _command_layers(overrides: Iterable[str]) -> tuple[list[Layer], list[SpecError]]:
    layers, violations = list[Layer](), list[SpecError]()
    for override in overrides:
        try:
            layers.append(parse_override(override))
        except SpecError as error:
            violations += error.violations if isinstance(error, SpecErrors) else [error]
    return layers, violations


def parse_override(override: str) -> Layer:
    """The layer of an override such as `parallel.tp=2`; its value is YAML: `null`, `true`, `{seed: 3}`."""
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        hint = "overrides are dotted.key=value, such as parallel.tp=2"
        raise SpecError(f"{override!r} is not an override", where="command line", hint=hint)
    if not text.strip():
        hint = f"{key}=null removes a value"
        raise SpecError(f"{override!r} has no value", where="command line", hint=hint)
    parsed: Parsed = parse_yaml(text, f"command line {key}")
    if parsed.violations:
        raise SpecErrors(parsed.violations)
    tree: Any = parsed.value
    for part in reversed(keys):
        tree = {part: tree}
    return layer_of(tree, COMMAND_LINE)


def _family_of(layer: Layer, folder: Path) -> Layer | None:
    """The model that this layer starts from as a separate layer, if it names one."""
    model = layer.tree.get("model")
    name = cast(dict[str, Any], model).get("family") if isinstance(model, dict) else model
    if not isinstance(name, str):
        return None
    is_file = _is_path(name) and (_exists(folder / name) or _exists(Path(name)))
    if isinstance(model, dict) and not is_family(name) and not is_file:
        return None  # only a display name: the mapping contains the model itself
    beside = folder / name
    try:
        model = model_at(beside) if is_file and _exists(beside) else load_model(name)
    except OSError as error:  # such as a name that is too long for a file
        raise SpecError(f"{show_value(name)} cannot be read: {error.strerror}") from None
    return layer_of({"model": model.model_dump(mode="json")}, Origin("family", name))


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(".json")


def _without_name(layer: Layer) -> Layer:
    """The layer without the name of its model's family; the other fields stay."""
    if not isinstance(layer.tree["model"], dict):
        return layer.without(("model",))
    bare = layer.without(("model", "family"))
    origins = {path: origin for path, origin in bare.origins.items() if path != ("model",)}
    return replace(bare, origins=origins)


def _unknown_family(merged: Layer, found: list[SpecError]) -> list[SpecError]:
    """The error for an incomplete model whose display name is close to the name of a family."""
    model = merged.tree.get("model")
    name = cast(dict[str, Any], model).get("family") if isinstance(model, dict) else None
    incomplete = any("model" in each.where and each.fact.endswith("is missing") for each in found)
    if not incomplete or not isinstance(name, str):
        return []
    where = placed("model.family", merged.origin_of(("model", "family")))
    hint = nearest(name, FAMILIES) or "`meshwright models list` names the families"
    return [SpecError(f"there is no model family {name!r}", where=where, hint=hint)]
