"""Keywords of the Python face to a spec.

A keyword is a field (`parallel={"zero": 3}`) or, where only one field has that name, the field inside a
part (`zero=3`). `run` is a YAML file with the same fields, which keywords override.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from meshwright.errors import SpecError, SpecErrors
from meshwright.spec.base import Spec
from meshwright.spec.modules import ModuleSpec
from meshwright.spec.origin import Layer, Origin, layer_of
from meshwright.spec.rules_modules import require_valid_module
from meshwright.spec.violations import all_keys, nearest, spec_of, violations_of
from meshwright.spec.yaml_text import parse_yaml

AnySpec = TypeVar("AnySpec", bound=ModuleSpec)


def read_settings(kind: type[AnySpec], run: str | Path | None, settings: Mapping[str, Any]) -> AnySpec:
    """The spec that a file and keywords describe, before its rules; everything unknown is told at once."""
    said = layer_of(_required_parts(kind), Origin("default"))
    if run is not None:
        said = said.covered_by(_file_layer(Path(run)))
    homes = _homes(kind)
    violations: list[SpecError] = []
    for name, value in settings.items():
        try:
            said = said.covered_by(_keyword_layer(kind, name, value, homes))
        except SpecError as error:
            violations.append(error)
    try:
        spec = kind.model_validate(said.tree)
    except ValidationError as error:
        raise SpecErrors(violations + violations_of(error, kind, said)) from None
    if violations:
        raise SpecErrors(violations)
    return spec


def spread(spec: AnySpec, num_ranks: int) -> AnySpec:
    """The spec for this many ranks: those that no axis takes are data-parallel. Its rules are then asked."""
    parallel = spec.parallel
    if parallel.dp == 1 and num_ranks > parallel.num_ranks and num_ranks % parallel.num_ranks == 0:
        dp = num_ranks // parallel.num_ranks
        axis = {"dp_shard": dp} if parallel.zero else {"dp_replicate": dp}
        spec = spec.with_(parallel=parallel.with_(**axis))
    elif parallel.zero and num_ranks == 1 and parallel.dp == 1:
        spec = spec.with_(parallel=parallel.with_(zero=0))  # one rank alone: nothing to share, same numbers
    return require_valid_module(spec)


def _required_parts(kind: type[Spec]) -> dict[str, Any]:
    """The parts that have no default, empty: what is missing is then told by the name of the keyword."""
    fields = kind.model_fields.items()
    return {name: {} for name, field in fields if field.is_required() and spec_of(field) is not None}


def _file_layer(file: Path) -> Layer:
    try:
        parsed = parse_yaml(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SpecError(f"cannot be read: {reason}", where=str(file), hint="name a YAML file") from None
    if parsed.violations:
        raise SpecErrors(parsed.violations)
    if not isinstance(parsed.value, dict):
        raise SpecError("this is no mapping of keys to values", where=str(file))
    origins = {path: Origin("file", f"{file}:{line}") for path, line in parsed.lines.items()}
    return Layer(cast(dict[str, Any], parsed.value), origins)


def _keyword_layer(kind: type[Spec], name: str, value: Any, homes: Mapping[str, list[str]]) -> Layer:
    plain = value.model_dump() if isinstance(value, Spec) else value
    if name in kind.model_fields:
        return layer_of({name: plain}, Origin("default"))
    found = homes.get(name, [])
    if not found:
        known = [*kind.model_fields, *homes]
        hint = nearest(name, known) or f"fields are {', '.join(kind.model_fields)}"
        raise SpecError(f"there is no setting {name!r}", where=name, hint=hint)
    if len(found) > 1:
        parts = " and ".join(found)
        part, _, rest = found[0].partition(".")
        raise SpecError(f"{name} could be {parts}", where=name, hint=f"say {part}={{{rest!r}: {plain!r}}}")
    tree: Any = plain
    for part in reversed(found[0].split(".")):
        tree = {part: tree}
    return layer_of(tree, Origin("default"))


def _homes(kind: type[Spec]) -> dict[str, list[str]]:
    """The dotted keys inside the parts of a spec, by their last word."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, found in kind.model_fields.items():
        below = spec_of(found)
        for key in all_keys(below, f"{name}.") if below else ():
            homes[key.rpartition(".")[2]].append(key)
    return homes
