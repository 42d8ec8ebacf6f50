"""What the user has decided already: `tp=8`, `parallel.zero=3`, `recompute=none,selective`, `optim.kind=sgd`.

A pin on something the search decides restricts it to one value or a few; every other key is laid over
the run as an override.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import SpecError
from meshwright.plan.workload.layouts import CP_KINDS, RECOMPUTE_BITS
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import all_keys, nearest
from meshwright.units import parse_count

SEARCHED_KEYS = {
    **{
        f"parallel.{name}": name
        for name in (
            *("dp_replicate", "dp_shard", "zero", "cp", "cp_kind", "cp_inner", "tp", "pp"),
            *("schedule", "virtual_stages", "ep", "etp"),
        )
    },
    "data.microbatch_sequences": "microbatch_sequences",
    "memory.recompute": "recompute",
    "memory.recompute_every": "recompute_every",
    "accumulation": "num_microbatches",
    "num_ranks": "num_ranks",
}
"""Keys that the search decides, and the column of a layout that each restricts."""
KEY_OF_COLUMN = {column: key for key, column in SEARCHED_KEYS.items()}
_WORDS: Mapping[str, Sequence[str]] = {
    "schedule": SCHEDULES,
    "cp_kind": CP_KINDS,
    "recompute": tuple(RECOMPUTE_BITS),
}
_CODES: Mapping[str, Callable[[str], int]] = {
    "schedule": lambda word: [str(name) for name in SCHEDULES].index(word),
    "cp_kind": lambda word: [str(kind) for kind in CP_KINDS].index(word),
    "recompute": lambda word: RECOMPUTE_BITS[word],
}


@dataclass(frozen=True)
class Pins:
    """Columns the user restricted, and overrides of everything else."""

    allowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    said: Mapping[str, str] = field(default_factory=dict[str, str])
    """The words of each restricted column, for messages."""
    overrides: tuple[str, ...] = ()

    def keep(self, column: str, values: Sequence[int]) -> list[int]:
        """The values that the pins leave; a pinned value counts even where nobody proposed it."""
        return list(self.allowed[column]) if column in self.allowed else list(values)

    def permits(self, **columns: int) -> bool:
        """Whether these values of columns are all allowed."""
        return all(value in self.allowed.get(column, (value,)) for column, value in columns.items())

    def without(self, column: str) -> "Pins":
        """The same pins but for one."""
        allowed = {name: values for name, values in self.allowed.items() if name != column}
        return Pins(allowed, self.said, self.overrides)


def parse_pins(words: Sequence[str]) -> Pins:
    """Pins from the command line; an unknown key or value suggests the nearest."""
    allowed: dict[str, tuple[int, ...]] = {}
    said: dict[str, str] = {}
    overrides: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip() or not text.strip():
            hint = "pins are key=value, such as tp=8 or memory.recompute=none"
            raise SpecError(f"{word!r} is not a pin", where="command line", hint=hint)
        column = SEARCHED_KEYS.get(_full_key(key.strip()))
        if column is None:
            overrides.append(word)
            continue
        if column in allowed:
            fact = f"{key} is pinned twice: {said[column]} and {word}"
            raise SpecError(fact, where="command line", hint=f"say it once; {key}=2,4 allows both")
        allowed[column] = tuple(_value(column, key, part.strip()) for part in text.split(","))
        said[column] = word
    return Pins(allowed, said, tuple(overrides))


def _full_key(key: str) -> str:
    """`tp` is short for `parallel.tp`; a key that is nothing at all is refused."""
    if key in SEARCHED_KEYS:
        return key
    short = {full.rsplit(".", 1)[-1]: full for full in SEARCHED_KEYS}
    if key in short:
        return short[key]
    if "." not in key and key not in RunSpec.model_fields:
        known = [*short, *all_keys(RunSpec)]
        homes = [full for full in all_keys(RunSpec) if full.rsplit(".", 1)[-1] == key]
        hint = f"did you mean {homes[0]!r}?" if homes else nearest(key, known)
        raise SpecError(
            f"there is no key {key!r}", where="command line", hint=hint or "`meshwright schema` lists all"
        )
    return key


def _value(column: str, key: str, text: str) -> int:
    if column in _WORDS:
        if text not in _WORDS[column]:
            hint = f"{nearest(text, _WORDS[column])} use {', '.join(_WORDS[column])}".strip()
            raise SpecError(f"{key} is {text!r}", where="command line", hint=hint)
        return _CODES[column](text)
    try:
        number = parse_count(text)
    except ValueError as error:
        raise SpecError(f"{key} is {text!r}: {error}", where="command line") from None
    lowest = 0 if column == "zero" else 1
    highest = 3 if column == "zero" else 10**7
    if not isinstance(number, int) or not lowest <= number <= highest:
        raise SpecError(f"{key} is {text}", where="command line", hint=f"use {lowest} to {highest}")
    return number
