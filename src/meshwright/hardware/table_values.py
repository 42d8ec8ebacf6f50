"""Reads numbers with their sources from the TOML tables of devices and clusters."""

import difflib
from collections.abc import Mapping
from typing import Any, cast

from meshwright.errors import SpecError

Table = Mapping[str, Any]


def read_value(table: Table, key: str, where: str, sources: dict[str, str]) -> float:
    """The number of a key; where it comes from is added to `sources`."""
    entry = table.get(key)
    if isinstance(entry, (int, float)) and not isinstance(entry, bool):
        sources[key] = "user file"
        return float(entry)
    if isinstance(entry, dict):
        pair = cast("dict[str, object]", entry)
        number = pair.get("value")
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            sources[key] = str(pair.get("source", "user file"))
            return float(number)
    raise SpecError(
        f"{key} is missing or not a number", where=where, hint="give { value = ..., source = ... }"
    )


def read_rates(table: Table, key: str, where: str, sources: dict[str, str]) -> dict[str, float]:
    """The numbers of an inner table by name; where each comes from is added to `sources`."""
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        raise SpecError(f"{key} is not a table", where=where)
    rates: dict[str, float] = {}
    for name in cast("dict[str, object]", inner):
        found: dict[str, str] = {}
        rates[name] = read_value(cast("Table", inner), name, f"{where}.{key}", found)
        sources[f"{key}.{name}"] = found[name]
    return rates


def check_positive(numbers: Mapping[str, float], where: str) -> None:
    """Raise SpecError at a number that is not positive and finite."""
    for key, number in numbers.items():
        if not 0 < number < 1e30:
            raise SpecError(f"{key} = {number:g} is not a positive finite number", where=where)


def refuse_unknown(table: Table, known: set[str], where: str) -> None:
    """Raise SpecError at a key that is not known, with the nearest one."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise SpecError(
                f"unknown key {key!r}",
                where=where,
                hint=f"did you mean {near[0]!r}?" if near else ", ".join(known),
            )
