"""Compares the metrics of two runs step by step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.history import History, Numbers

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
        """Something was compared, the steps are the same, and no quantity differs beyond the tolerance."""
        same_steps = not self.only_in_a and not self.only_in_b
        different = any(difference.num_different for difference in self.differences)
        return bool(self.differences) and same_steps and not different


def compare_histories(a: History, b: History, *, rtol: float = 0.0) -> Comparison:
    """Differences of two metric histories; rtol 0 means bit for bit."""
    shared, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    differences = [
        _difference(name, shared, _at(a, name, in_a), _at(b, name, in_b), rtol=rtol) for name in COMPARED
    ]
    return Comparison(
        num_steps=len(shared),
        only_in_a=np.setdiff1d(a.steps, b.steps, assume_unique=True).tolist(),
        only_in_b=np.setdiff1d(b.steps, a.steps, assume_unique=True).tolist(),
        differences=[difference for difference in differences if difference.num_compared],
        settings=[],
    )


def relative_difference(a: Numbers, b: Numbers) -> Numbers:
    """|a - b| / max(|a|, |b|); 0 for two equal or two NaN values, infinite when only one is finite."""
    # Scaled before subtracting: the difference of two huge numbers of opposite sign could overflow.
    size = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.abs(a / size - b / size)
    found = np.where(np.isfinite(a) & np.isfinite(b), found, math.inf)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, found)


def different_settings(run_a: Mapping[str, Any], run_b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) wherever two resolved runs differ; None where absent."""
    a, b = dict(_leaves(run_a)), dict(_leaves(run_b))
    keys = [*a, *(key for key in b if key not in a)]
    return [(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]


class _Column(NamedTuple):
    values: Numbers
    recorded: NDArray[np.bool_]


def _at(history: History, name: str, rows: NDArray[np.intp]) -> _Column:
    if name not in history.columns:
        return _Column(np.full(len(rows), math.nan), np.zeros(len(rows), np.bool_))
    return _Column(history.columns[name][rows], history.recorded[name][rows])


def _difference(name: str, steps: NDArray[np.int64], a: _Column, b: _Column, *, rtol: float) -> Difference:
    compared = a.recorded | b.recorded
    relative = np.where(a.recorded & b.recorded, relative_difference(a.values, b.values), math.inf)[compared]
    steps = steps[compared]
    different = steps[relative > rtol]
    largest = int(relative.argmax()) if len(relative) else None
    return Difference(
        name=name,
        num_compared=len(relative),
        num_different=len(different),
        first_different=int(different[0]) if len(different) else None,
        max_relative=0.0 if largest is None else float(relative[largest]),
        max_relative_at=int(steps[largest]) if largest is not None and relative[largest] > 0 else None,
    )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
