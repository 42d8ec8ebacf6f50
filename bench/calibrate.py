"""Fits the planner's two constants per framework and the interval widths: `python bench/calibrate.py`.

It reads tests/data/published_runs.csv and writes calibration.toml of `plan` (our runtime) and of `published`
(the peers). It prints the error with the constants fitted on all rows, and with each row's source left out of
the fit. The fit is a grid search over precomputed predictions, so it does not depend on a starting point.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench.our_runtime import our_runtime_table
from bench.vtrain import vtrain_groups

from meshwright.errors import SpecError
from meshwright.plan.framework import our_runtime
from meshwright.plan.time.interval import KINDS, kind_of
from meshwright.plan.time.step_time import step_cost
from meshwright.published.frameworks import find_framework, frameworks
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
# A second constant has to lower the loss by this factor.
SECOND_CONSTANT = 1.05
# Losses that differ by less than this share are equal.
EQUALLY_GOOD = 1e-3
COVERAGE = 0.9
# A kind with fewer rows than this from other sources borrows the rows of its neighbour.
ROWS_FOR_WIDTH = 20
NEIGHBOUR = {"dense_one_node": "dense_several_nodes"}
# vTrain's 1,440 step times on one node have one source: each 24th of them counts beside published runs.
VTRAIN, VTRAIN_EVERY = "megatron-deepspeed", 24


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

    @property
    def kind(self) -> str:
        """The kind of run, which has its own interval."""
        return kind_of(self.run.workload, self.run.cluster)

    @property
    def is_target(self) -> bool:
        """Dense, on A100 or H100, with the layout and the batch stated."""
        return self.run.workload.model.moe is None and self.run.cluster.device.name[:4] in ("a100", "h100")

    @property
    def weight(self) -> float:
        """Weight in the fit: dense Ampere and Hopper rows count more than the others."""
        return 1.0 if self.is_target else 0.4


def _on_all_points(run: TableRun) -> np.ndarray:
    """Step seconds at every point of the grid: one layout for each, with constants as arrays."""
    kernel, exposed = (np.array(values) for values in zip(*GRID, strict=True))
    constants: dict[str, Any] = {"kernel_slowdown": kernel, "exposed_communication": exposed}
    at = run.at.take(np.zeros(len(GRID), dtype=np.int64))
    # Equal layouts would be priced once; `cp_inner` tells them apart, and no published row uses it.
    at = replace(at, cp_inner=np.arange(1, len(GRID) + 1))
    return step_cost(run.workload, at, run.cluster, replace(run.framework, **constants)).step_seconds


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
            rows.append(Row(line, cells["source"], cells["framework"], run, seconds, _on_grid(run)))
    return rows


def fit(rows: Iterable[Row], *, two: bool) -> int:
    """The grid point with the smallest weighted absolute log error; the middle one of equally good points.

    With two rows, every constant between those that meet one of them is equally good.
    """
    chosen = list(rows)
    errors = np.array([np.abs(np.log(row.predicted / row.seconds)) for row in chosen])
    weights = np.array([row.weight for row in chosen])
    # A row far off is no evidence about the constants: its error counts as 30% at most.
    loss = (weights[:, None] * np.minimum(errors, 0.3)).sum(axis=0)
    is_one = np.array([exposed == EXPOSED[_one()] for _, exposed in GRID])
    loss = np.where(is_one, loss, SECOND_CONSTANT * loss if two else np.inf)
    equal = np.flatnonzero(loss <= (1.0 + EQUALLY_GOOD) * loss.min())
    return int(equal[(len(equal) - 1) // 2])


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


@dataclass(frozen=True)
class LeftOut:
    """A published time whose source was left out of the fit; line 0 is a row of vTrain on one node."""

    line: int
    source: str
    kind: str
    ratio: float
    """Predicted over measured."""

    @property
    def distance(self) -> float:
        """The half-width of the narrowest interval that contains the measured time."""
        return max(self.ratio, 1.0 / self.ratio) - 1.0


def left_out_times(rows: list[Row]) -> list[LeftOut]:
    """Every published row, and a sample of the rows of vTrain on one node."""
    ratios = leaving_source_out(rows)
    found = [LeftOut(r.line, r.source, r.kind, float(x)) for r, x in zip(rows, ratios, strict=True)]
    others = [row for row in rows if row.framework != VTRAIN]
    kernel, exposed = GRID[_fit_framework([], others, "a100")]
    framework = replace(find_framework(VTRAIN), kernel_slowdown=kernel, exposed_communication=exposed)
    sampled = np.concatenate([g.predicted / g.measured for g in vtrain_groups(framework)])[::VTRAIN_EVERY]
    return found + [LeftOut(0, "vTrain, one node", "dense_one_node", float(ratio)) for ratio in sampled]


def width(times: Iterable[LeftOut]) -> float:
    """The half-width that contains nine of ten of these times (the conformal quantile)."""
    distances = np.sort([time.distance for time in times])
    rank = min(int(np.ceil(COVERAGE * (len(distances) + 1))), len(distances))
    return round(float(distances[rank - 1]), 3)


def widths_without_source(times: list[LeftOut]) -> list[float]:
    """The half-width for each time, from the times of its kind that other sources published."""
    cache: dict[tuple[str, str], float] = {}
    for time in times:
        key = (time.kind, time.source)
        if key not in cache:
            others = [t for t in times if t.kind == time.kind and t.source != time.source]
            if len(others) < ROWS_FOR_WIDTH:
                others += [t for t in times if t.kind == NEIGHBOUR.get(time.kind) and t.source != time.source]
            cache[key] = width(others)
    return [cache[time.kind, time.source] for time in times]


def write(points: dict[str, int], times: list[LeftOut], rows: list[Row]) -> None:
    """The intervals and the constants of our runtime, and those of the peers with their number of rows."""
    everything = _fit_framework([], rows)
    ours = our_runtime().name
    widths = [f"{kind} = {width(t for t in times if t.kind == kind)}" for kind in KINDS]
    own = sorted(max(row.time_ratio, 1.0 / row.time_ratio) - 1.0 for row in our_runtime_table())
    widths.append(f"measured = {max(0.08, round(own[int(COVERAGE * len(own))], 3))}")
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


def write_left_out(times: list[LeftOut]) -> None:
    """Predicted over measured with the source left out, for the accuracy page."""
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", "kind", "predicted_over_measured", "half_width"])
        for time, half in zip(times, widths_without_source(times), strict=True):
            writer.writerow([time.line, time.kind, f"{time.ratio:.4f}", half])


def _summary(name: str, ratios: np.ndarray) -> str:
    errors = np.abs(ratios - 1.0)
    return f"{name:42} n {len(ratios):4} median {np.median(errors):6.1%}  p90 {np.quantile(errors, 0.9):6.1%}"


def main() -> None:
    """Fit, write the constants, and print the errors."""
    rows = load()
    points = fitted_points(rows)
    times = left_out_times(rows)
    write(points, times, rows)
    write_left_out(times)
    fitted = {row.line: row.predicted[points[row.framework]] / row.seconds for row in rows}
    halves = widths_without_source(times)
    for kind in KINDS:
        members = [(time, half) for time, half in zip(times, halves, strict=True) if time.kind == kind]
        seen = [fitted[time.line] for time, _ in members if time.line]
        inside = np.mean([time.distance <= half for time, half in members])
        print(_summary(kind, np.array(seen)))
        print(_summary("    leaving its source out", np.array([time.ratio for time, _ in members])), end="")
        print(f"  inside the interval {inside:.1%}, half-width {width(time for time, _ in members):.1%}")
    for name, point in points.items():
        print(name, GRID[point])


if __name__ == "__main__":
    main()
