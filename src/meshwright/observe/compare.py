"""Two runs step by step: where they first differ, and by how much at most."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.observe.metrics import Row

COMPARED = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Difference:
    """How far one quantity is apart in two runs."""

    name: str
    num_compared: int
    """Places (steps, or parameters) that have it in at least one of the runs."""
    num_different: int
    """Of these, how many differ by more than the tolerance; one that a run lacks differs."""
    first_different: int | None
    """The first step that differs; None for weights, which are compared at one step."""
    max_relative: float
    """Largest |a - b| / max(|a|, |b|) over places that both have; infinite where one is not finite."""
    max_relative_at: int | None
    """The step of the largest difference."""


@dataclass(frozen=True)
class Comparison:
    """Two runs' differences and what they have in common."""

    num_steps: int
    """Steps that both runs recorded."""
    only_in_a: list[int]
    only_in_b: list[int]
    differences: list[Difference]
    settings: list[tuple[str, Any, Any]]
    """(dotted key, value in a, value in b) of the resolved runs where they differ."""

    @property
    def is_equal(self) -> bool:
        """The same steps, and no quantity differs by more than the tolerance."""
        same_steps = not self.only_in_a and not self.only_in_b
        return same_steps and not any(difference.num_different for difference in self.differences)


def compare_rows(rows_a: list[Row], rows_b: list[Row], *, rtol: float = 0.0) -> Comparison:
    """Differences of two metric histories; rtol 0 asks for the very same numbers."""
    a, b = _by_step(rows_a), _by_step(rows_b)
    shared = sorted(a.keys() & b.keys())
    differences = [_difference(name, shared, a, b, rtol=rtol) for name in COMPARED]
    return Comparison(
        num_steps=len(shared),
        only_in_a=sorted(a.keys() - b.keys()),
        only_in_b=sorted(b.keys() - a.keys()),
        differences=[difference for difference in differences if difference.num_compared],
        settings=[],
    )


def relative_difference(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); 0 for two equal or two NaN values, infinite when only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    # Scaled before subtracting: the difference of two huge numbers of opposite sign could overflow.
    size = max(abs(a), abs(b))
    return abs(a / size - b / size)


def different_settings(run_a: Mapping[str, Any], run_b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) wherever two resolved runs differ; None where absent."""
    a, b = dict(_leaves(run_a)), dict(_leaves(run_b))
    keys = [*a, *(key for key in b if key not in a)]
    return [(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]


def _by_step(rows: list[Row]) -> dict[int, Row]:
    return {int(row["step"] or 0): row for row in rows}


def _difference(
    name: str, steps: list[int], a: dict[int, Row], b: dict[int, Row], *, rtol: float
) -> Difference:
    pairs = {step: (a[step].get(name), b[step].get(name)) for step in steps}
    pairs = {step: pair for step, pair in pairs.items() if pair != (None, None)}
    apart = {step: _apart(*pair) for step, pair in pairs.items()}
    different = [step for step, relative in apart.items() if relative > rtol]
    largest = max(apart, key=_reader(apart), default=None)
    return Difference(
        name=name,
        num_compared=len(apart),
        num_different=len(different),
        first_different=different[0] if different else None,
        max_relative=0.0 if largest is None else apart[largest],
        max_relative_at=largest if largest is not None and apart[largest] > 0 else None,
    )


def _reader(values: dict[int, float]) -> Callable[[int], float]:
    return lambda step: values[step]


def _apart(a: float | None, b: float | None) -> float:
    return math.inf if a is None or b is None else relative_difference(a, b)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
