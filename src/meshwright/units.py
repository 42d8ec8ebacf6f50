"""Numbers with units as text, such as `4M` tokens, `80GiB` or `30d`: parsed and shown."""

import math
import re

_DECIMAL_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT_SUFFIX = _DECIMAL_SUFFIX | {"ki": 2**10, "mi": 2**20, "gi": 2**30}
_BYTE_SUFFIX = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS_SUFFIX = {
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "y": 31557600.0,
}
_NUMBER_AND_SUFFIX = re.compile(r"^\s*([+-]?[0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER_AND_SUFFIX.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with an optional unit")
    return float(match.group(1).replace("_", "").replace(",", "")), match.group(2).lower()


def _scaled(text: str, suffixes: dict[str, float] | dict[str, int], examples: str) -> float:
    number, suffix = _split(text)
    if suffix not in suffixes:
        raise ValueError(f"unknown unit {suffix!r} in {text!r}; use {examples}")
    value = number * suffixes[suffix]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _refuse_bool(value: object) -> None:
    """Raise for a bool: Python accepts True as 1, but `true` for a number in a run file is a mistake."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")


def parse_count(value: object) -> object:
    """`4M` -> 4000000, `128Ki` -> 131072, `1e6` -> 1000000; other values than text are returned unchanged."""
    _refuse_bool(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    scaled = _scaled(value, _COUNT_SUFFIX, "K, M, B, T, Ki or Mi")
    if abs(scaled - round(scaled)) > 1e-6 * max(1.0, abs(scaled)):
        raise ValueError(f"{value!r} is not a whole number")
    return round(scaled)


def parse_bytes(value: object) -> object:
    """`80GiB` -> 85899345920, `80GB` -> 80000000000; a plain number is in bytes."""
    _refuse_bool(value)
    if not isinstance(value, str):
        return value
    number, suffix = _split(value)
    return round(number) if not suffix else round(_scaled(value, _BYTE_SUFFIX, "MB, GB, MiB or GiB"))


def parse_seconds(value: object) -> object:
    """`30d` -> 2592000.0, `90min` -> 5400.0; a plain number is in seconds."""
    _refuse_bool(value)
    if not isinstance(value, str):
        return value
    number, suffix = _split(value)
    return number if not suffix else _scaled(value, _SECONDS_SUFFIX, "s, min, h, d, w or y")


def parse_number(value: object) -> object:
    """`3e-4` -> 0.0003, which YAML 1.1 reads as text because it has no dot."""
    _refuse_bool(value)
    if not isinstance(value, str):
        return value
    number, suffix = _split(value)
    if suffix:
        raise ValueError(f"{value!r} is not a plain number")
    return number


def show_count(count: float) -> str:
    """4000000 -> `4M`, 8030261248 -> `8.03B`: three significant digits."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= size * 0.9995:
            return f"{float(f'{count / size:.3g}'):g}{suffix}"
    return f"{float(f'{count:.3g}'):g}"


def show_number(count: int, noun: str) -> str:
    """`1 rank`, `8 ranks`: a number with its noun, whose plural ends in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_bytes(num_bytes: float) -> str:
    """85899345920 -> `80.0 GiB`."""
    for size, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


_SHOWN_UNITS = (
    (2 * 31557600.0, 31557600.0, "years"),
    (2 * 86400.0, 86400.0, "days"),
    (3600.0, 3600.0, "h"),
    (60.0, 60.0, "min"),
    (1.0, 1.0, "s"),
    (0.0, 1e-3, "ms"),
)
"""(seconds from which on, seconds of the unit, name)."""


def _shown_unit(seconds: float) -> tuple[float, str]:
    return next((unit, name) for least, unit, name in _SHOWN_UNITS if seconds >= least)


def show_seconds(seconds: float) -> str:
    """0.0123 -> `12.3 ms`, 5400 -> `1.5 h`, 2592000 -> `30.0 days`."""
    unit, name = _shown_unit(seconds)
    if name == "ms":
        return f"{seconds / unit:.3g} ms"
    digits = 2 if seconds < 600 else 1  # so that steps of about a minute can be distinguished
    return f"{seconds / unit:.{digits}f} {name}"


def show_range(low: float, high: float) -> str:
    """48.81 and 60.6 seconds -> `48.8 s to 60.6 s`: both in the unit of the smaller."""
    unit, name = _shown_unit(low)
    return " to ".join(f"{float(f'{seconds / unit:.3g}'):g} {name}" for seconds in (low, high))
