"""Fits the planner's two constants per framework and the interval widths: `python bench/calibrate.py`.

It reads tests/data/published_runs.csv and writes calibration.toml of `plan` (our runtime) and of `published`
(the peers). It prints the error with the constants fitted on all rows, and with each row's source left out of
the fit. The fit is a grid search over precomputed predictions, so it does not depend on a starting point.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import SpecError
from meshwright.plan.framework import our_runtime
from meshwright.plan.time.step_time import COMMUNICATION, StepCost, step_cost
from meshwright.published.frameworks import frameworks
from meshwright.published.table import TableRun, measured_seconds, read_row

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "published_runs.csv"
LEFT_OUT = ROOT / "tests" / "data" / "left_out.csv"
RUNTIME = ROOT / "src" / "meshwright" / "plan" / "calibration.toml"
PEERS = ROOT / "src" / "meshwright" / "published" / "calibration.toml"
HEADING = "# Written by bench/calibrate.py from tests/data/published_runs.csv."
KERNELS = np.round(np.geomspace(0.85, 1.7, 19), 3)
EXPOSED = np.round(np.geomspace(0.5, 2.0, 7), 3)
GRID = [(float(kernel), float(exposed)) for kernel, exposed in product(KERNELS, EXPOSED)]
# Frameworks with fewer rows than this keep `exposed_communication` at one: a row cannot fit two constants.
ROWS_FOR_TWO = 5
# The promise is nine of ten, a test checks 85 to 95%; this is the smallest share that the fit accepts.
COVERAGE = 0.875


_priced: dict[tuple[str, ...], np.ndarray] = {}


@dataclass(frozen=True)
class Row:
    """A published step time and its predictions at every point of the grid."""

    line: int
    source: str
    framework: str
    run: TableRun
    seconds: float
    predicted: np.ndarray
    features: np.ndarray
    """Shares of communication, waiting, and 1 for a routed model, at the middle of the grid."""

    @property
    def is_target(self) -> bool:
        """Dense, on A100 or H100, with the layout and the batch stated."""
        return self.run.workload.model.moe is None and self.run.cluster.device.name[:4] in ("a100", "h100")

    @property
    def weight(self) -> float:
        """Weight in the fit: dense Ampere and Hopper rows count more than the others."""
        return 1.0 if self.is_target else 0.4


def _at(run: TableRun, kernel: float, exposed: float) -> StepCost:
    framework = replace(run.framework, kernel_slowdown=kernel, exposed_communication=exposed)
    return step_cost(run.workload, run.at, run.cluster, framework)


def _on_all_points(run: TableRun) -> np.ndarray:
    """Step seconds at every point of the grid: one layout for each, with constants as arrays."""
    kernel, exposed = (np.array(values) for values in zip(*GRID, strict=True))
    constants: dict[str, Any] = {"kernel_slowdown": kernel, "exposed_communication": exposed}
    at = run.at.take(np.zeros(len(GRID), dtype=np.int64))
    return step_cost(run.workload, at, run.cluster, replace(run.framework, **constants)).step_seconds


def _features(run: TableRun) -> np.ndarray:
    cost = _at(run, 1.1, 1.0)
    step = float(cost.step_seconds[0])
    communication = sum(float(cost.items[name][0]) for name in COMMUNICATION if name in cost.items)
    waiting = sum(
        float(cost.items[name][0]) for name in ("host", "bubble", "imbalance") if name in cost.items
    )
    return np.array([communication / step, waiting / step, float(run.workload.model.moe is not None)])


def _on_grid(run: TableRun) -> np.ndarray:
    """Step seconds at every grid point; rows of one layout (several releases) are priced once."""
    key = (repr(run.workload), repr(run.at), repr(run.cluster), repr(run.framework))
    if key not in _priced:
        _priced[key] = _on_all_points(run)
    return _priced[key]


def load() -> list[Row]:
    """Every row of the table that can be priced, states its layout, and publishes a time."""
    rows: list[Row] = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for line, cells in enumerate(csv.DictReader(file), start=2):
            try:
                run = read_row(cells, where=f"row {line}")
            except SpecError:
                continue
            seconds = measured_seconds(cells, run)
            if seconds is None or not cells["mbs"]:
                continue
            predicted = _on_grid(run)
            rows.append(
                Row(line, cells["source"], cells["framework"], run, seconds, predicted, _features(run))
            )
    return rows


def fit(rows: Iterable[Row], *, two: bool) -> int:
    """The grid point with the smallest weighted absolute log error."""
    chosen = list(rows)
    errors = np.array([np.abs(np.log(row.predicted / row.seconds)) for row in chosen])
    weights = np.array([row.weight for row in chosen])
    # A row far off is no evidence about the constants: its error counts as 30% at most.
    loss = (weights[:, None] * np.minimum(errors, 0.3)).sum(axis=0)
    if not two:
        loss = np.where([exposed == EXPOSED[_one()] for _, exposed in GRID], loss, np.inf)
    return int(loss.argmin())


def _one() -> int:
    return int(np.abs(EXPOSED - 1.0).argmin())


def _fit_framework(rows: list[Row], everything: list[Row], device: str | None = None) -> int:
    """Constants of one framework; where nothing is left of it, of all others on such devices."""
    if rows:
        return fit(rows, two=len(rows) >= ROWS_FOR_TWO)
    alike = [row for row in everything if device is None or row.run.cluster.device.name[:4] == device[:4]]
    return fit(alike or everything, two=False)


def fitted_points(rows: list[Row]) -> dict[str, int]:
    """Grid point of every framework that has rows."""
    names = {row.framework for row in rows}
    return {name: _fit_framework([r for r in rows if r.framework == name], rows) for name in sorted(names)}


def leaving_source_out(rows: list[Row]) -> np.ndarray:
    """Predicted over measured, each row with constants that never saw its source."""
    ratios = np.zeros(len(rows))
    cache: dict[tuple[str, str], int] = {}
    for index, row in enumerate(rows):
        key = (row.framework, row.source)
        if key not in cache:
            others = [other for other in rows if other.source != row.source]
            device = row.run.cluster.device.name
            cache[key] = _fit_framework([o for o in others if o.framework == row.framework], others, device)
        ratios[index] = row.predicted[cache[key]] / row.seconds
    return ratios


def fit_interval(rows: list[Row], ratios: np.ndarray) -> dict[str, float]:
    """Widths of the smallest interval (by its median) that contains enough of the left-out times."""
    features = np.stack([row.features for row in rows])
    distance = np.maximum(ratios, 1.0 / ratios) - 1.0
    best, chosen = np.inf, (0.1, 0.4, 0.2, 0.25)
    shares = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
    for widths in product(np.arange(0.05, 0.16, 0.005), shares, shares, np.arange(0.1, 0.6, 0.05)):
        half = widths[0] + features @ np.array(widths[1:])
        score = np.median(half) + 0.1 * half.mean()
        if score < best and (distance <= half).mean() >= COVERAGE:
            best, chosen = score, widths
    names = ("kernels", "communication", "waiting", "routed")
    return {name: round(float(width), 3) for name, width in zip(names, chosen, strict=True)}


def write(points: dict[str, int], interval: dict[str, float], rows: list[Row]) -> None:
    """The interval and the constants of our runtime, and those of the peers with the number of their rows."""
    everything = _fit_framework([], rows)
    ours = our_runtime().name
    widths = (f"{name} = {width}" for name, width in interval.items())
    note = "# bench/results/runtime_h200_2026-11-15.json; links as of all published runs"
    exposed = GRID[points.get(ours, everything)][1]
    lines = [HEADING, "", "[interval]", *widths, "", note, *_section("runtime", 1.0, exposed)]
    RUNTIME.write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [HEADING]
    for name in frameworks():
        if name != ours:
            count = sum(row.framework == name for row in rows)
            note = f"# {count} rows" if count else "# no published rows: the constants of all others"
            lines += ["", note, *_section(name, *GRID[points.get(name, everything)])]
    PEERS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _section(name: str, kernel: float, exposed: float) -> list[str]:
    return [f"[{name}]", f"kernel_slowdown = {kernel}", f"exposed_communication = {exposed}"]


def write_left_out(rows: list[Row], ratios: np.ndarray) -> None:
    """Predicted over measured with the source left out, for the accuracy page."""
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", "predicted_over_measured"])
        writer.writerows([row.line, f"{ratio:.4f}"] for row, ratio in zip(rows, ratios, strict=True))


def _summary(name: str, ratios: np.ndarray) -> str:
    errors = np.abs(ratios - 1.0)
    return f"{name:42} n {len(ratios):4} median {np.median(errors):6.1%}  p90 {np.quantile(errors, 0.9):6.1%}"


def main() -> None:
    """Fit, write the constants, and print the errors."""
    rows = load()
    points = fitted_points(rows)
    fitted = np.array([row.predicted[points[row.framework]] / row.seconds for row in rows])
    left_out = leaving_source_out(rows)
    interval = fit_interval(rows, left_out)
    write(points, interval, rows)
    write_left_out(rows, left_out)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[
            "dense A100/H100" if row.is_target else "routed" if row.features[2] else "dense others"
        ].append(index)
        groups[f"{row.framework} {'routed' if row.features[2] else 'dense'}"].append(index)
    for name, members in groups.items():
        print(_summary(name, fitted[members]))
        print(_summary("    leaving its source out", left_out[members]))
    half = np.stack([row.features for row in rows]) @ np.array([interval[k] for k in list(interval)[1:]])
    half = half + interval["kernels"]
    inside = np.maximum(left_out, 1 / left_out) - 1 <= half
    print(f"interval {interval}: coverage {inside.mean():.1%}, median half-width {np.median(half):.1%}")
    for name, point in points.items():
        print(name, GRID[point])


if __name__ == "__main__":
    main()
