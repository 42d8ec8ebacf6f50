"""Pins: settings that the user has decided, such as `tp=8`, `recompute=none,selective` or `optim.kind=sgd`.

A pin on a setting that the search decides restricts it to one value or a few. A pin on any other key
overrides that key of the run. A layout of the printed table can be pinned as it is printed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.errors import SpecError
from meshwright.plan.workload.layouts import CP_KINDS, EP_OVERLAPS, RECOMPUTE_BITS
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import all_keys, nearest
from meshwright.units import parse_count

SEARCHED_KEYS = {
    **{
        f"parallel.{name}": name
        for name in (
            *("dp_replicate", "dp_shard", "zero", "cp", "cp_kind", "cp_inner", "cp_stripes", "tp", "pp"),
            *("schedule", "virtual_stages", "ep", "etp", "ep_overlap"),
        )
    },
    "data.microbatch_sequences": "microbatch_sequences",
    "memory.recompute": "recompute",
    "memory.recompute_every": "recompute_every",
    "accumulation": "num_microbatches",
    "num_ranks": "num_ranks",
}
"""Keys that the search decides, and the column of `Layouts` that each of them restricts."""
_CODES: Mapping[str, Mapping[str, int]] = {
    "schedule": {name: code for code, name in enumerate(SCHEDULES)},
    "cp_kind": {name: code for code, name in enumerate(CP_KINDS)},
    "ep_overlap": {name: code for code, name in enumerate(EP_OVERLAPS)},
    "recompute": RECOMPUTE_BITS,
}
"""Columns whose values have names: the number in `Layouts` for each name."""


@dataclass(frozen=True)
class Pins:
    """Columns of `Layouts` that the user restricted, and overrides of other keys of the run."""

    allowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The values that each restricted column may take."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the user typed for each restricted column, for messages."""
    overrides: tuple[str, ...] = ()
    """`key=value` for every key that the search does not decide."""

    def restrict(self, column: str, proposed: Sequence[int]) -> list[int]:
        """The pinned values of a column, proposed or not; without a pin, the proposed ones."""
        return list(self.allowed.get(column, proposed))

    def permits(self, **columns: int) -> bool:
        """Whether the pins allow all of these values."""
        return all(value in self.allowed.get(column, (value,)) for column, value in columns.items())

    def without(self, column: str) -> "Pins":
        """The same pins with one column unrestricted."""
        return replace(self, allowed={name: each for name, each in self.allowed.items() if name != column})

    def override_of(self, key: str) -> str | None:
        """The override of this key as the user typed it; None where there is none."""
        return next((text for text in self.overrides if text.partition("=")[0].strip() == key), None)


def parse_pins(arguments: Sequence[str]) -> Pins:
    """Pins from the command line; the error for an unknown key or value suggests the nearest known one."""
    allowed: dict[str, tuple[int, ...]] = {}
    texts: dict[str, str] = {}
    overrides: list[str] = []
    for pin in (each for argument in arguments for each in _as_keys(argument)):
        key, equals, text = pin.partition("=")
        if not equals or not key.strip() or not text.strip():
            hint = "pins are key=value, such as tp=8 or memory.recompute=none"
            raise SpecError(f"{pin!r} is not a pin", where="command line", hint=hint)
        column = SEARCHED_KEYS.get(_full_key(key.strip()))
        if column is None:
            overrides.append(pin)
            continue
        if column in allowed:
            fact = f"{key} is pinned twice: {texts[column]} and {pin}"
            raise SpecError(fact, where="command line", hint=f"pin it once; {key}=2,4 allows both")
        allowed[column] = tuple(_value(column, key, part.strip()) for part in text.split(","))
        texts[column] = pin
    return Pins(allowed, texts, tuple(overrides))


def _as_keys(pin: str) -> list[str]:
    """A pin in the short form of the printed table, with the keys of a run: `micro=2x32` is two pins."""
    key, _, text = (part.strip() for part in pin.partition("="))
    if key == "micro":
        sequences, times, count = text.partition("x")
        return [f"data.microbatch_sequences={sequences}", *([f"accumulation={count}"] if times else [])]
    if key in ("recompute", "memory.recompute") and (parts := re.fullmatch(r"(\w+)/(\w+)", text)):
        return [f"recompute={parts[1]}", f"recompute_every={parts[2]}"]
    if key in ("offload", "memory.offload") and text and not text.startswith("["):
        names = [] if text == "none" else text.split("+")
        return [f"memory.offload=[{', '.join(names)}]"]
    return [f"parallel.{pin.strip()}"] if key == "grad_reduce" else [pin]


def _full_key(key: str) -> str:
    """`parallel.tp` for `tp`; SpecError for a key that neither the search nor a run has."""
    if key in SEARCHED_KEYS:
        return key
    short = {full.rsplit(".", 1)[-1]: full for full in SEARCHED_KEYS}
    if key in short:
        return short[key]
    if "." not in key and key not in RunSpec.model_fields:
        known = [*short, *all_keys(RunSpec)]
        full_keys = [full for full in all_keys(RunSpec) if full.rsplit(".", 1)[-1] == key]
        hint = f"did you mean {full_keys[0]!r}?" if full_keys else nearest(key, known)
        raise SpecError(
            f"there is no key {key!r}", where="command line", hint=hint or "`meshwright schema` lists all"
        )
    return key


def _value(column: str, key: str, text: str) -> int:
    codes = _CODES.get(column)
    if codes is not None:
        if text not in codes:
            hint = f"{nearest(text, list(codes))} use {', '.join(codes)}".strip()
            raise SpecError(f"{key} is {text!r}", where="command line", hint=hint)
        return codes[text]
    try:
        number = parse_count(text)
    except ValueError as error:
        raise SpecError(f"{key} is {text!r}: {error}", where="command line") from None
    lowest = 0 if column == "zero" else 1
    highest = 3 if column == "zero" else 10**7
    if not isinstance(number, int) or not lowest <= number <= highest:
        raise SpecError(f"{key} is {text}", where="command line", hint=f"use {lowest} to {highest}")
    return number
