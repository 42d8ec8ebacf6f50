"""Charts as inline SVG: stacked bars and a line chart. No scripts, no outside files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

PALETTE = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d"),
    *("#c5a3dd", "#ff9da6", "#79706e", "#a0cbe8", "#bab0ac", "#8cd17d", "#d37295", "#f1ce63"),
)
Place = Callable[[float, float], tuple[float, float]]
WIDTH, LABEL_WIDTH, VALUE_WIDTH = 940, 96, 92
BAR_HEIGHT, BAR_GAP = 30, 14
SMALLEST_SHOWN = 0.002
"""Parts of a bar below this share of it are left out of the legend."""


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, in order."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    """One line of words; `kind` is a class of the style sheet."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True)
class Bar:
    """One stacked bar: a label, its parts, and the words at its end."""

    label: str
    parts: Mapping[str, float]
    total_words: str


def stacked_bars(bars: Sequence[Bar], *, full: float, limit: tuple[float, str] | None = None) -> str:
    """Horizontal stacked bars on one scale that ends at `full`; `limit` draws a line with words."""
    plot = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    scale = plot / full
    shade = colours(list(dict.fromkeys(name for bar in bars for name in bar.parts)))
    top = 26 if limit else 6
    parts: list[str] = []
    for index, bar in enumerate(bars):
        y = top + index * (BAR_HEIGHT + BAR_GAP)
        parts += _bar(bar, y, scale, shade, LABEL_WIDTH + limit[0] * scale if limit else None)
    height = top + len(bars) * (BAR_HEIGHT + BAR_GAP)
    if limit is not None:
        x = LABEL_WIDTH + limit[0] * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height - 6}" class="limit"/>')
        parts.append(text(x, 12, limit[1], kind="small", anchor="middle"))
    legend, legend_height = _legend(bars, shade, height)
    return _svg(WIDTH, height + legend_height, [*parts, *legend])


def _svg(width: float, height: float, parts: list[str]) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" preserveAspectRatio="xMinYMin"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def _bar(bar: Bar, y: float, scale: float, shade: Mapping[str, str], limit_x: float | None) -> list[str]:
    """One bar; its words step over the line of the limit."""
    x = float(LABEL_WIDTH)
    parts = [text(0, y + BAR_HEIGHT / 2 + 5, bar.label)]
    for name, value in bar.parts.items():
        width = max(value, 0.0) * scale
        if width > 0.2:
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{shade[name]}"'
            parts.append(f"<rect {box}><title>{escape(name)}</title></rect>")
        x += width
    if limit_x is not None and -60 < x - limit_x < 8:
        x = limit_x
    parts.append(text(x + 8, y + BAR_HEIGHT / 2 + 5, bar.total_words, kind="strong"))
    return parts


def _legend(bars: Sequence[Bar], shade: Mapping[str, str], top: float) -> tuple[list[str], float]:
    longest = max(sum(bar.parts.values()) for bar in bars)
    shown = [
        name for name in shade if any(bar.parts.get(name, 0.0) > SMALLEST_SHOWN * longest for bar in bars)
    ]
    x, y = float(LABEL_WIDTH), top + 14
    parts: list[str] = []
    for name in shown:
        width = 28 + 7.0 * len(name)
        if x + width > WIDTH:
            x, y = float(LABEL_WIDTH), y + 22
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="13" height="13" rx="2" fill="{shade[name]}"/>'
        )
        parts.append(text(x + 19, y, name, kind="small"))
        x += width
    return parts, y - top + 12


@dataclass(frozen=True)
class Line:
    """A named series of points."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def line_chart(lines: Sequence[Line], *, x_words: str, y_words: str, height: int = 320) -> str:
    """Lines over a logarithmic x, from zero up, with points and a mark for every x."""
    left, right, top, bottom = 84, 210, 16, 46
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    x_low, x_high = math.log(xs[0]), math.log(xs[-1] if xs[-1] > xs[0] else xs[0] * 2)
    y_high = max(ys) * 1.1

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - x_low) / (x_high - x_low)
        up = y / y_high
        return left + across * (WIDTH - left - right), height - bottom - up * (height - bottom - top)

    parts = _grid(xs, y_high, place, height - bottom)
    for line in lines:
        parts += _polyline(line, [place(x, y) for x, y in line.points])
    parts.append(text((left + WIDTH - right) / 2, height - 8, x_words, kind="small", anchor="middle"))
    parts.append(text(left - 72, 12, y_words, kind="small"))
    for index, line in enumerate(lines):
        y = top + 22 + 24 * index
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        start = WIDTH - right + 24
        stroke = f'stroke="{line.colour}" stroke-width="2.5"{dash}'
        parts.append(f'<line x1="{start}" x2="{start + 26}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        parts.append(text(start + 34, y, line.name, kind="small"))
    return _svg(WIDTH, height, parts)


def _polyline(line: Line, places: list[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>']
    if not line.dashed:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>' for x, y in places]
    return parts


def _grid(xs: Sequence[float], y_high: float, place: Place, floor: float) -> list[str]:
    parts: list[str] = []
    for x in xs:
        across, _ = place(x, 0.0)
        parts.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{floor}" y2="{floor + 5}" class="axis"/>'
        )
        parts.append(text(across, floor + 19, f"{x:,.0f}", kind="small", anchor="middle"))
    for value in _round_values(y_high):
        left, up = place(xs[0], value)
        right, _ = place(xs[-1], value)
        parts.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{up:.1f}" y2="{up:.1f}" class="grid"/>')
        parts.append(text(left - 8, up + 4, _short(value), kind="small", anchor="end"))
    return parts


def _round_values(high: float) -> list[float]:
    """Three to six round numbers from zero to below `high`."""
    power = 10.0 ** math.floor(math.log10(high))
    step = next(size * power for size in (0.2, 0.5, 1.0, 2.0) if high / (size * power) <= 6)
    return [step * index for index in range(int(high / step) + 1)]


def _short(value: float) -> str:
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
