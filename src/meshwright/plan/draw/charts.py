"""Charts as SVG: stacked bars, and lines over a linear or logarithmic x."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright import svg
from meshwright.svg import PALETTE, Entry, Plot, Scale, round_ticks

WIDTH, LABEL_LEFT, LABEL_WIDTH, VALUE_WIDTH = 940, 6, 100, 92
BAR_HEIGHT, BAR_GAP = 30, 14
MIN_LEGEND_SHARE = 0.002
"""Parts below this share of the longest bar are left out of the legend."""
PLOT_LEFT, LEGEND_WIDTH, PLOT_BOTTOM = 84, 210, 50
MOST_X_LABELS = 9


@dataclass(frozen=True)
class Chart:
    """The parts of a picture and its height; every chart is WIDTH wide."""

    parts: list[str]
    height: float
    label: str

    def inline(self) -> str:
        """The chart inside a page."""
        return svg.inline(self.parts, WIDTH, self.height, label=self.label)

    def document(self) -> str:
        """The chart as a file."""
        return svg.document(self.parts, WIDTH, self.height, label=self.label)


@dataclass(frozen=True)
class Bar:
    """One stacked bar: its label, its parts, and the text at its end."""

    label: str
    parts: Mapping[str, float]
    total: str


def stacked_bars(
    bars: Sequence[Bar], *, full: float, limit: tuple[float, str] | None = None, label: str = ""
) -> Chart:
    """Horizontal stacked bars on one scale that ends at `full`; `limit` is a vertical line with its text."""
    scale = Scale(0.0, full, LABEL_WIDTH, WIDTH - VALUE_WIDTH)
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    limit_x = scale.place(limit[0]) if limit else None
    top = 26 if limit else 6
    parts: list[str] = []
    for index, bar in enumerate(bars):
        parts += _bar(bar, top + index * (BAR_HEIGHT + BAR_GAP), scale, colours, limit_x)
    bottom = top + len(bars) * (BAR_HEIGHT + BAR_GAP)
    if limit and limit_x:
        ends = (limit_x, 18), (limit_x, bottom - 6)
        parts.append(svg.line(*ends, stroke="limit", stroke_width=1.5, stroke_dasharray="4 3"))
        parts.append(svg.text(limit_x, 12, limit[1], size=12, fill="soft", anchor="middle"))
    least = MIN_LEGEND_SHARE * max(sum(bar.parts.values()) for bar in bars)
    shown = [name for name in names if any(bar.parts.get(name, 0.0) > least for bar in bars)]
    entries = [Entry(name, colours[name]) for name in shown]
    legend, last = svg.box_legend(entries, left=LABEL_WIDTH, right=WIDTH, y=bottom + 14)
    return Chart([*parts, *legend], last + 12, label)


def _bar(bar: Bar, y: float, scale: Scale, colours: Mapping[str, str], limit_x: float | None) -> list[str]:
    """One bar; the text at its end does not cross the line of the limit."""
    middle = y + BAR_HEIGHT / 2 + 5
    parts = [svg.text(LABEL_LEFT, middle, bar.label)]
    total = 0.0
    for name, value in bar.parts.items():
        start, end = scale.place(total), scale.place(total + max(value, 0.0))
        if end - start > 0.2:
            parts.append(svg.rect(start, y, end - start, BAR_HEIGHT, fill=colours[name], title=name))
        total += max(value, 0.0)
    x = scale.place(total)
    if limit_x is not None and -60 < x - limit_x < 8:
        x = limit_x
    return [*parts, svg.text(x + 8, middle, bar.total, weight=600)]


@dataclass(frozen=True)
class Line:
    """A named series of points."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False
    has_dots: bool = False


@dataclass(frozen=True)
class Axis:
    """The name of an axis and how its values are written."""

    name: str
    show: Callable[[float], str]
    is_log: bool = False


def line_chart(lines: Sequence[Line], *, x: Axis, y: Axis, title: str = "", height: int = 320) -> Chart:
    """Lines from zero up, with a legend on the right."""
    xs = sorted({at for line in lines for at, _ in line.points}) or [1.0]
    high = max((up for line in lines for _, up in line.points), default=1.0) * 1.1 or 1.0
    top = 58 if title else 34
    plot = Plot(
        Scale(xs[0], xs[-1], PLOT_LEFT, WIDTH - LEGEND_WIDTH, is_log=x.is_log),
        Scale(0.0, high, height - PLOT_BOTTOM, top),
    )
    every = -(-len(xs) // MOST_X_LABELS)
    parts = [svg.text(PLOT_LEFT - 8, 22, title, size=15, weight=600)] if title else []
    parts += plot.grid(round_ticks(0.0, high), y.show) + plot.x_labels(xs[::every], x.show)
    parts += plot.names(x.name, y.name)
    for line in lines:
        parts.append(plot.line(line.points, line.colour, is_dashed=line.is_dashed))
        parts += plot.dots(line.points, line.colour, radius=4) if line.has_dots else []
    entries = [Entry(line.name, line.colour, is_dashed=line.is_dashed) for line in lines]
    parts += svg.line_legend(entries, WIDTH - LEGEND_WIDTH + 24, top + 14)
    return Chart(parts, height, title)
