"""YAML to plain values with line numbers, and back.

Scalars follow YAML 1.2: `1e-4` is a number, `no` and `on` are text. Duplicate keys, aliases that expand
without bound and too deep nesting are refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from meshwright.errors import SpecError

MAX_VALUES = 10_000
MAX_DEPTH = 32
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"^[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)$")
_MAX_DIGITS = 400  # a longer scalar is read as text, not as a number
_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "null", "bool", "int", "float", "timestamp", "merge", "value")
}
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Parsed:
    """Plain values, the line of every key in them, and the violations found while reading."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict[Path, int])
    violations: list[SpecError] = field(default_factory=list[SpecError])


def parse_yaml(text: str, place: str) -> Parsed:
    """The one document in `text`; `place` is its name in errors (`run.yaml`, `command line`)."""
    try:
        return _Reader(place).read(_compose(text))
    except yaml.YAMLError as error:
        raise _syntax_error(error, place) from None
    except RecursionError:
        raise _too_deep(place) from None


def _compose(text: str) -> yaml.Node | None:
    return cast(Any, yaml).compose(text, Loader=yaml.SafeLoader)


def _syntax_error(error: yaml.YAMLError, place: str) -> SpecError:
    hint = "put text with special characters in quotes; indent with spaces"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        first_line = str(error).splitlines()[0]
        return SpecError(f"this is not YAML: {first_line}", where=place, hint=hint)
    context = f" ({error.context})" if error.context else ""
    where = f"{place}:{error.problem_mark.line + 1}"
    return SpecError(f"this is not YAML: {error.problem}{context}", where=where, hint=hint)


def _too_deep(place: str) -> SpecError:
    return SpecError(
        f"values are nested deeper than {MAX_DEPTH} levels",
        where=place,
        hint="a run file is three or four levels deep; look for an alias that contains itself",
    )


class _Reader:
    """Walks the node graph once and counts values, so that aliases cannot expand without bound."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.num_values = 0
        self.lines: dict[Path, int] = {}
        self.violations: list[SpecError] = []

    def read(self, node: yaml.Node | None) -> Parsed:
        value = None if node is None else self._value(node, ())
        return Parsed(value, self.lines, self.violations)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise SpecError(f"more than {MAX_VALUES} values", where=self.place, hint="check the aliases")
        if len(path) > MAX_DEPTH:
            raise _too_deep(self.place)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if node.tag not in _TAGS:
            self._refuse_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return scalar(node)

    def _refuse_tag(self, node: yaml.Node, path: Path) -> None:
        where = f"{self.place}:{node.start_mark.line + 1} {'.'.join(map(str, path))}".rstrip()
        self.violations.append(
            SpecError(f"the tag {node.tag!r} is not supported", where=where, hint="write the plain value")
        )

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "[...]"
            dotted = ".".join(map(str, (*path, key)))
            if key in result:
                first = self.lines[(*path, key)]
                self.violations.append(
                    SpecError(
                        f"{dotted} is set twice: in line {first} and in line {line}",
                        where=f"{self.place}:{line} {dotted}",
                        hint="keep one of the two",
                    )
                )
                continue
            self.lines[(*path, key)] = line
            result[key] = self._value(value_node, (*path, key))
        return result


def scalar(node: yaml.Node) -> Any:
    """The value of one scalar: quoted text stays text, plain text is read as in YAML 1.2."""
    text = str(node.value)
    if getattr(node, "style", None) is not None or len(text) > _MAX_DIGITS:
        return text
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL_FLOAT.match(text):
        return float(text.replace(".", "", 1))
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that the reader above, or one of YAML 1.1, would not read as text.

    Accelerate and kubectl read YAML 1.1, in which `no` is false.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: list(each) for first, each in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
for _tag, _pattern in (
    ("null", _NULL),
    ("bool", _BOOL),
    ("int", _INT),
    ("float", _FLOAT),
    ("float", _SPECIAL_FLOAT),
):
    cast(Any, _Dumper).add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)


def dump_yaml(value: Any) -> str:
    """Block-style YAML that `parse_yaml` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dump_json(value: Any) -> str:
    """Indented JSON, as a file."""
    return json.dumps(value, indent=2) + "\n"


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path; an empty mapping is a leaf."""
    if isinstance(value, dict) and value:
        for key, child in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from walk(child, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield path, value
