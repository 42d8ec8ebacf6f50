"""From the keywords of `fit` and `prepare` to a spec.

A keyword is a field (`parallel={"zero": 3}`) or, where only one field has that name, a field of a nested
spec (`zero=3`). `run` is a YAML file with the same fields, which keywords override. `spec/keywords.py` has
the types of the keywords.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from meshwright.errors import SpecError, SpecErrors
from meshwright.files import read_text
from meshwright.spec.base import Spec
from meshwright.spec.modules import ModuleSpec
from meshwright.spec.origin import Layer, Origin, layer_of
from meshwright.spec.renamed import new_name
from meshwright.spec.rules_modules import require_valid_module
from meshwright.spec.violations import all_keys, nearest, spec_of, violations_of
from meshwright.spec.yaml_text import parse_yaml

AnySpec = TypeVar("AnySpec", bound=ModuleSpec)
FileSpec = TypeVar("FileSpec", bound=Spec)


def read_settings(kind: type[AnySpec], run: str | Path | None, settings: Mapping[str, Any]) -> AnySpec:
    """The spec of a file and keywords, before its rules; all unknown keywords are reported at once."""
    merged = layer_of(_required_specs(kind), Origin("default"))
    if run is not None:
        merged = merged.overridden_by(_file_layer(Path(run)))
    nested = nested_keys(kind)
    violations: list[SpecError] = []
    for name, value in settings.items():
        try:
            merged = merged.overridden_by(_keyword_layer(kind, name, value, nested))
        except SpecError as error:
            violations.append(error)
    try:
        spec = kind.model_validate(merged.tree)
    except ValidationError as error:
        raise SpecErrors(violations + violations_of(error, kind, merged)) from None
    if violations:
        raise SpecErrors(violations)
    return spec


def read_spec_file(kind: type[FileSpec], file: Path) -> FileSpec:
    """The spec of a YAML file; everything that is wrong with the file is reported at once."""
    layer = _file_layer(file)
    try:
        return kind.model_validate(layer.tree)
    except ValidationError as error:
        raise SpecErrors(violations_of(error, kind, layer)) from None


def with_data_parallel(spec: AnySpec, num_ranks: int) -> AnySpec:
    """The spec for this many ranks, with rules checked; ranks that no axis uses become data-parallel."""
    parallel = spec.parallel
    if parallel.dp == 1 and num_ranks > parallel.num_ranks and num_ranks % parallel.num_ranks == 0:
        dp = num_ranks // parallel.num_ranks
        axis = {"dp_shard": dp} if parallel.zero else {"dp_replicate": dp}
        spec = spec.with_(parallel=parallel.with_(**axis))
    elif parallel.zero and num_ranks == 1 and parallel.dp == 1:
        # One rank has nothing to shard; the numbers are the same.
        spec = spec.with_(parallel=parallel.with_(zero=0))
    return require_valid_module(spec)


def _required_specs(kind: type[Spec]) -> dict[str, Any]:
    """The nested specs without a default, empty: then a missing field is reported by its own name."""
    fields = kind.model_fields.items()
    return {name: {} for name, field in fields if field.is_required() and spec_of(field) is not None}


def _file_layer(file: Path) -> Layer:
    try:
        parsed = parse_yaml(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SpecError(f"cannot be read: {reason}", where=str(file), hint="name a YAML file") from None
    if parsed.violations:
        raise SpecErrors(parsed.violations)
    if not isinstance(parsed.value, dict):
        raise SpecError("this is not a mapping of keys to values", where=str(file))
    origins = {path: Origin("file", f"{file}:{line}") for path, line in parsed.lines.items()}
    return Layer(cast(dict[str, Any], parsed.value), origins)


def _keyword_layer(kind: type[Spec], name: str, value: Any, nested: Mapping[str, list[str]]) -> Layer:
    plain = value.model_dump() if isinstance(value, Spec) else value
    if name in kind.model_fields:
        return layer_of({name: plain}, Origin("default"))
    found = nested.get(name, [])
    if not found:
        renamed = new_name(name)
        known = [*kind.model_fields, *nested]
        hint = f"it is called {renamed!r}" if renamed else nearest(name, known)
        hint = hint or f"fields are {', '.join(kind.model_fields)}"
        raise SpecError(f"there is no setting {name!r}", where=name, hint=hint)
    if len(found) > 1:
        field, _, rest = found[0].partition(".")
        hint = f"use {field}={{{rest!r}: {plain!r}}}"
        raise SpecError(f"{name} could be {' and '.join(found)}", where=name, hint=hint)
    tree: Any = plain
    for part in reversed(found[0].split(".")):
        tree = {part: tree}
    return layer_of(tree, Origin("default"))


def nested_keys(kind: type[Spec]) -> dict[str, list[str]]:
    """The dotted keys inside the nested specs of a spec, by their last part. Items of lists have none."""
    keys: dict[str, list[str]] = defaultdict(list)
    for name, found in kind.model_fields.items():
        below = spec_of(found)
        for key in all_keys(below, f"{name}.", in_lists=False) if below else ():
            keys[key.rpartition(".")[2]].append(key)
    return keys
