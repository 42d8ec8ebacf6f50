"""Errors of pydantic's validation as fact, where and hint."""

import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.errors import SpecError
from meshwright.spec.base import Spec
from meshwright.spec.origin import Layer, Origin
from meshwright.spec.renamed import new_name
from meshwright.spec.yaml_text import Path

_LONGEST_SHOWN = 60
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a number of sensible size",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
}
_SYNONYMS = {"gpu": "cuda", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
"""Words of other frameworks for values of ours."""
_BOUNDS = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}


def violations_of(error: ValidationError, root: type[Spec], layer: Layer) -> list[SpecError]:
    """Every error of one validation, in the order of the file if there is one."""
    return [_violation(details, root, layer) for details in error.errors(include_url=False)]


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'tp'?`, or nothing when no known name is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {matches[0]!r}?" if matches else ""


def placed(dotted: str, origin: Origin) -> str:
    """`run.yaml:12 parallel.tp`; the key alone if the value is a default."""
    return dotted if origin.kind == "default" else f"{origin.where} {dotted}"


def show_value(value: Any) -> str:
    """A value as YAML writes it, truncated when long."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _violation(details: ErrorDetails, root: type[Spec], layer: Layer) -> SpecError:
    path: Path = tuple(details["loc"])
    dotted = ".".join(map(str, path))
    fact, hint = _fact_and_hint(details, dotted, root)
    return SpecError(fact, where=placed(dotted, layer.origin_of(path)), hint=hint)


def _fact_and_hint(details: ErrorDetails, dotted: str, root: type[Spec]) -> tuple[str, str]:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    path = tuple(details["loc"])
    shown = show_value(value)
    if kind == "extra_forbidden":
        return f"there is no key {_last(path)!r}" + _in(path), _hint_for_unknown(path, root)
    if kind == "missing":
        return f"{dotted} is missing", _hint_for_missing(path, root)
    if kind == "literal_error":
        allowed = _allowed(field_at(path, root))
        advice = f"{nearest(_SYNONYMS.get(str(value), str(value)), allowed)} use {_one_of(allowed)}"
        return f"{dotted} is {shown}", advice.strip()
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        below = spec_of(field_at(path, root))
        return f"{dotted} is {shown}, not a mapping", f"its keys are {_one_of(_keys(below))}"
    if kind == "tuple_type":
        found = field_at(path, root)
        keys = _one_of(_keys(spec_of(found)))
        items = f"mappings, each with {keys}" if keys else _one_of(_allowed(found))
        return (
            f"{dotted} is {shown}, not a list",
            f"a list of {items}" if items else f"write a list: [{value}]",
        )
    if kind in _EXPECTED:
        return f"{dotted} is {shown}, not {_EXPECTED[kind]}", _hint_for_type(kind, value, dotted)
    if kind in _BOUNDS or kind == "less_than_equal":
        limit = next(iter(context.values()))
        return f"{dotted} is {shown}", f"use {_BOUNDS.get(kind, 'at most')} {limit}"
    if kind == "value_error":
        return f"{dotted} is {shown}: {context['error']}", _meaning(field_at(path, root))
    if kind == "string_pattern_mismatch":
        return (
            f"{dotted} is {shown}",
            "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return f"{dotted} is {shown}: {details['msg']}", _meaning(field_at(path, root))


def _last(path: Path) -> str:
    return str(path[-1]) if path else ""


def _in(path: Path) -> str:
    return f" in {'.'.join(map(str, path[:-1]))}" if len(path) > 1 else ""


def _hint_for_unknown(path: Path, root: type[Spec]) -> str:
    parent = spec_of(field_at(path[:-1], root)) if len(path) > 1 else root
    keys, every_key = _keys(parent), all_keys(root)
    renamed = new_name(".".join(map(str, path)))
    if renamed is not None:
        return f"it is called {renamed!r} since version 2"
    if (elsewhere := _of_records(path, keys)) is not None:
        return elsewhere
    if "." in _last(path) and _last(path) in every_key:
        return "in a file each part of a dotted key is on its own line, indented below the one before"
    close = nearest(_last(path), keys)
    if close:
        return close
    homes = [dotted for dotted in every_key if dotted.rsplit(".", 1)[-1] == _last(path)]
    # A word that several sections have, such as `kind`, says little about which of them is meant.
    is_clear = len(homes) == 1 or (homes and len(path) == 1)
    return f"did you mean {homes[0]!r}?" if is_clear else f"the keys here are {_one_of(keys)}"


_RECORDS_FILE = "records files of `meshwright.open_loader` have it"
_KEYS_OF_RECORDS = {
    "sources": f"list token datasets in data.blend; {_RECORDS_FILE}",
    "join": f"join texts before they are packed; {_RECORDS_FILE}",
    "part": "data.holdout: {share: 0.01} keeps a share for evaluation, chosen by a hash",
    "max_tokens": f"data.packing=whole fills each sequence with complete documents; {_RECORDS_FILE}",
    "num_workers": f"tokens are read ahead by one thread, without workers; {_RECORDS_FILE}",
    "workers": f"tokens are read ahead by one thread, without workers; {_RECORDS_FILE}",
    "prefetch": f"two batches of tokens are read ahead; {_RECORDS_FILE}",
    "on_device": "data.on_device_bytes: 2GiB keeps the data on the device, within so much memory",
}
"""Settings of records and of `fit` that a token run has in another form, or not at all."""


def _of_records(path: Path, keys: list[str]) -> str | None:
    """Where a setting of records lives, for a key of the data of a token run."""
    is_token_data = len(path) > 1 and path[0] == "data" and "packing" in keys
    return _KEYS_OF_RECORDS.get(_last(path)) if is_token_data else None


def _hint_for_missing(path: Path, root: type[Spec]) -> str:
    found = field_at(path, root)
    below = spec_of(found)
    if below is not None:
        return f"a mapping with {_one_of(_keys(below))}"
    allowed = _allowed(found)
    return f"use {_one_of(allowed)}" if allowed else _meaning(found)


def _hint_for_type(kind: str, value: Any, dotted: str) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f'put it in quotes: {dotted.rsplit(".", 1)[-1]}: "{value}"'
    if kind.startswith("bool"):
        return "write true or false"
    if kind == "int_from_float":
        return "integers may also be written 4K, 2M or 1e6"
    return ""


def _meaning(found: FieldInfo | None) -> str:
    return (found.description or "").replace("\n", " ") if found else ""


def field_at(path: Path, root: type[Spec]) -> FieldInfo | None:
    """The field that a path names, if there is one."""
    spec: type[Spec] | None = root
    found: FieldInfo | None = None
    for key in path:
        if isinstance(key, int):  # an item of a list of specs: `found` is the field of the list
            continue
        found = spec.model_fields.get(str(key)) if spec else None
        spec = spec_of(found)
    return found


def spec_of(found: FieldInfo | None) -> type[Spec] | None:
    """The spec class of a field (`MoeSpec` of `MoeSpec | None`, or of a list), or None for plain values."""
    options = _options(found.annotation) if found else ()
    return next((option for option in options if isinstance(option, type) and issubclass(option, Spec)), None)


def all_keys(root: type[Spec], prefix: str = "", *, in_lists: bool = True) -> list[str]:
    """Every dotted key of a spec and its nested specs, with `in_lists` also of specs in lists."""
    keys: list[str] = []
    for name, found in root.model_fields.items():
        keys.append(prefix + name)
        below = spec_of(found)
        if below is not None and (in_lists or get_origin(found.annotation) is not tuple):
            keys += all_keys(below, f"{prefix}{name}.", in_lists=in_lists)
    return keys


def _options(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    if get_origin(annotation) is tuple:
        return get_args(annotation)
    return (annotation,)


def _keys(spec: type[Spec] | None) -> list[str]:
    return list(spec.model_fields) if spec else []


def _allowed(found: FieldInfo | None) -> list[str]:
    options = _options(found.annotation) if found else ()
    return [str(word) for option in options if get_origin(option) is Literal for word in get_args(option)]


def _one_of(words: list[str]) -> str:
    return ", ".join(words[:-1]) + (f" or {words[-1]}" if len(words) > 1 else "".join(words))
