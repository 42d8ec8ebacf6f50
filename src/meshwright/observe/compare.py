"""Compares the metrics of two runs step by step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.observe.metrics import Row

COMPARED = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between two runs."""

    name: str
    num_compared: int
    """Steps (or tensors) that have the quantity in at least one of the runs."""
    num_different: int
    """How many of these differ by more than the tolerance; one that is missing in a run differs."""
    first_different: int | None
    """The first step that differs; None for weights, which are compared at one step."""
    max_relative: float
    """Largest |a - b| / max(|a|, |b|) over what both have; infinite where one is not finite."""
    max_relative_at: int | None
    """The step of the largest difference."""


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs, and the steps that they share."""

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
    """Differences of two metric histories; rtol 0 means bit for bit."""
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
    relative = {step: _relative(*pair) for step, pair in pairs.items()}
    different = [step for step, value in relative.items() if value > rtol]
    largest = max(relative, key=lambda step: relative[step], default=None)
    return Difference(
        name=name,
        num_compared=len(relative),
        num_different=len(different),
        first_different=different[0] if different else None,
        max_relative=0.0 if largest is None else relative[largest],
        max_relative_at=largest if largest is not None and relative[largest] > 0 else None,
    )


def _relative(a: float | None, b: float | None) -> float:
    return math.inf if a is None or b is None else relative_difference(a, b)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
