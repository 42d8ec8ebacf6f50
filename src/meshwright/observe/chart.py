"""Line charts of a run's metrics: the plot area as SVG, ticks in percent of it for the page around.

The page needs no script to show a chart; its script only shows the values under the pointer. Long histories
are thinned such that every spike and dip is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright import svg
from meshwright.svg import round_ticks
from meshwright.units import show_count

MAX_POINTS = 480
PLOT_WIDTH, PLOT_HEIGHT = 1000, 300
# A value this many times above the 98th percentile would flatten everything else.
_OUTLIER_RATIO = 4.0

# A larger loss has diverged in any format, and ranges would overflow.
_LARGEST_DRAWN = 1e30

Point = tuple[float, float]
Points = NDArray[np.float64]
"""(step, value) pairs: an array of two columns."""


@dataclass(frozen=True)
class Series:
    """One line of a chart; y may be NaN or infinite, which breaks the line and is marked at the top."""

    label: str
    points: Points
    style: str = "main"
    """A class of the style sheet: main, second, faint."""
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The contents of a chart."""

    title: str
    note: str = ""
    """A short sentence under the title."""
    series: list[Series]
    unit: str = ""
    from_zero: bool = True
    level: tuple[str, float] | None = None
    """A labelled horizontal line."""
    marks: list[float] = field(default_factory=list)
    """Steps with a vertical line (resumes)."""
    show: Callable[[float], str] = show_count


@dataclass(frozen=True)
class Tick:
    """A labelled position, in percent of the plot."""

    percent: float
    label: str


@dataclass(frozen=True)
class Line:
    """One drawn series: a path in plot coordinates, and its values for the pointer."""

    label: str
    style: str
    path: str
    dots: str
    steps: list[float]
    values: list[float]


@dataclass(frozen=True)
class Drawing:
    """A chart as the page needs it."""

    title: str
    note: str
    description: str
    unit: str
    low_step: float
    high_step: float
    low: float
    high: float
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Tick]
    rim: list[Tick]
    level: Tick | None

    @property
    def plot(self) -> str:
        """The plot area as SVG, stretched by the page; its classes are those of report.css."""
        right, down = PLOT_WIDTH / 100, PLOT_HEIGHT / 100
        across = f"H{PLOT_WIDTH}"
        parts = [_path_of("grid", f"M0 {tick.percent * down:.1f}{across}") for tick in self.y_ticks]
        parts += [_path_of("mark", f"M{mark.percent * right:.1f} 0V{PLOT_HEIGHT}") for mark in self.marks]
        if self.level:
            parts.append(_path_of("level", f"M0 {self.level.percent * down:.1f}{across}"))
        for line in self.lines:
            parts.append(_path_of(f"line {line.style}", line.path))
            parts += [_path_of(f"dots {line.style}", line.dots)] if line.dots else []
        return svg.inline(parts, PLOT_WIDTH, PLOT_HEIGHT, label=self.description, is_stretched=True)


def _path_of(kind: str, d: str) -> str:
    return svg.element("path", class_=kind, d=d)


def is_drawn(y: Points) -> NDArray[np.bool_]:
    """Whether values can be drawn: finite, and not absurdly large."""
    return np.isfinite(y) & (np.abs(y) < _LARGEST_DRAWN)


def drawable(points: ArrayLike) -> Points:
    """The points whose values can be drawn."""
    found = as_points(points)
    return found[is_drawn(found[:, 1])]


def as_points(points: ArrayLike) -> Points:
    """(step, value) pairs as an array of two columns."""
    return np.asarray(points, dtype=np.float64).reshape(-1, 2)


def draw(chart: Chart) -> Drawing | None:
    """A chart as the page needs it, or None when no series has a point."""
    drawn = [series for series in chart.series if len(series.points)]
    if not drawn:
        return None
    x_scale = _step_range(drawn)
    y_scale, clipped = _value_range(chart, drawn)
    return Drawing(
        title=chart.title,
        note=" ".join(filter(None, [chart.note, clipped])),
        description=_describe(chart, drawn[0]),
        unit=chart.unit,
        low_step=x_scale[0],
        high_step=x_scale[1],
        low=y_scale[0],
        high=y_scale[1],
        lines=[_line(series, x_scale, y_scale) for series in drawn],
        x_ticks=[Tick(_percent(x, x_scale), f"{x:,.0f}") for x in _step_ticks(x_scale)],
        y_ticks=[Tick(100 - _percent(y, y_scale), chart.show(y)) for y in round_ticks(*y_scale)],
        marks=[Tick(_percent(x, x_scale), f"{x:,.0f}") for x in chart.marks],
        rim=[Tick(_percent(x, x_scale), f"{x:,.0f}") for x in _non_finite(drawn)],
        level=_level(chart, y_scale),
    )


def thin(points: ArrayLike, max_points: int = MAX_POINTS) -> list[Point]:
    """About `max_points` of the points: the ends, and the lowest and the highest of each stretch."""
    found = as_points(points)
    if len(found) <= max_points:
        return [(float(x), float(y)) for x, y in found]
    stretch = math.ceil(2 * len(found) / max_points)
    kept = [found[0], found[-1]]
    for start in range(0, len(found), stretch):
        kept += _extremes(found[start : start + stretch])
    return sorted({(float(x), float(y)) for x, y in kept})


def _extremes(points: Points) -> list[Points]:
    """The lowest and the highest point, and the first one that cannot be drawn, at infinity."""
    drawn = drawable(points)
    extremes = [drawn[drawn[:, 1].argmin()], drawn[drawn[:, 1].argmax()]] if len(drawn) else []
    broken = points[~is_drawn(points[:, 1])]
    return extremes + ([np.array([broken[0, 0], math.inf])] if len(broken) else [])


def smooth(points: ArrayLike, window: int, max_points: int = MAX_POINTS // 2) -> Points:
    """Interquartile means of windows centred on evenly chosen points: a single spike has no influence."""
    drawn = drawable(points)
    last = len(drawn) - 1
    chosen = (
        sorted({*range(0, last + 1, math.ceil(len(drawn) / max_points) or 1), last}) if len(drawn) else []
    )
    result: list[Point] = []
    for index in chosen:
        # Windows shrink towards the ends, so the line starts and ends where the values do.
        reach = min(window // 2, index, last - index)
        values = np.sort(drawn[index - reach : index + reach + 1, 1])
        left_out = len(values) // 4
        result.append((drawn[index, 0], values[left_out : len(values) - left_out].mean()))
    return as_points(result)


def _step_range(drawn: list[Series]) -> Point:
    low = min(float(series.points[:, 0].min()) for series in drawn)
    high = max(float(series.points[:, 0].max()) for series in drawn)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _step_ticks(x_scale: Point) -> list[float]:
    ticks = [x for x in round_ticks(*x_scale) if x == round(x)]
    return ticks or [round((x_scale[0] + x_scale[1]) / 2)]


def _value_range(chart: Chart, drawn: list[Series]) -> tuple[Point, str]:
    """Lowest and highest value of the y axis, and a sentence when outliers are outside of it."""
    points = drawable(np.concatenate([series.points for series in drawn]))
    level = [chart.level[1]] if chart.level else []
    values = np.sort(np.concatenate([points[:, 1], np.array(level, np.float64)]))
    if not len(values):
        return (0.0, 1.0), ""
    low, high, clipped = float(values[0]), float(values[-1]), ""
    usual = float(values[int(0.98 * (len(values) - 1))])
    if usual > 0 and high > _OUTLIER_RATIO * usual:
        peak_step = points[points[:, 1].argmax(), 0]
        clipped = f"Off the scale: {chart.show(high)}{chart.unit} at step {peak_step:,.0f}."
        high = 1.5 * usual
    low = min(0.0, low) if chart.from_zero else low
    margin = 0.06 * (high - low)
    if margin <= 1e-9 * abs(high) or margin < 1 / _LARGEST_DRAWN:  # a flat line still needs a range
        margin = max(0.5 * abs(high), 1e-9) if high else 1.0
    return (low if low == 0 else low - margin, high + margin), clipped


def _line(series: Series, x_scale: Point, y_scale: Point) -> Line:
    points = thin(series.points)
    finite = [(float(x), float(y)) for x, y in drawable(points)]
    with_dots = finite if series.dots or len(finite) <= 30 else []
    return Line(
        label=series.label,
        style=series.style,
        path=_path(points, x_scale, y_scale),
        dots="".join(f"M{_place(point, x_scale, y_scale)}h0" for point in with_dots),
        steps=[x for x, _ in finite],
        values=[float(f"{y:.6g}") for _, y in finite],
    )


def _path(points: list[Point], x_scale: Point, y_scale: Point) -> str:
    """The path of a line; a non-finite value breaks it."""
    parts: list[str] = []
    pen = "M"
    for point in points:
        if not math.isfinite(point[1]) or abs(point[1]) >= _LARGEST_DRAWN:
            pen = "M"
            continue
        parts.append(pen + _place(point, x_scale, y_scale))
        pen = "L"
    return "".join(parts)


def _place(point: Point, x_scale: Point, y_scale: Point) -> str:
    x = _percent(point[0], x_scale) * PLOT_WIDTH / 100
    y = PLOT_HEIGHT - min(_percent(point[1], y_scale), 110) * PLOT_HEIGHT / 100
    return f"{x:.1f} {y:.1f}"


def _percent(value: float, scale: Point) -> float:
    return round(100 * (value - scale[0]) / (scale[1] - scale[0]), 3)


def _non_finite(drawn: list[Series]) -> list[float]:
    steps = np.unique(np.concatenate([series.points[~is_drawn(series.points[:, 1]), 0] for series in drawn]))
    return [x for x, _ in thin(np.stack([steps, np.zeros_like(steps)], axis=1), max_points=60)]


def _level(chart: Chart, y_scale: Point) -> Tick | None:
    if chart.level is None:
        return None
    label, value = chart.level
    return Tick(100 - _percent(value, y_scale), label)


def _describe(chart: Chart, series: Series) -> str:
    """The chart in a sentence, for screen readers."""
    (first_step, first), (last_step, last) = series.points[0].tolist(), series.points[-1].tolist()
    return (
        f"{chart.title}: {chart.show(first)}{chart.unit} at step {first_step:,.0f}, "
        f"{chart.show(last)}{chart.unit} at step {last_step:,.0f}"
    )
