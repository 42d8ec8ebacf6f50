"""Predicted against published as an SVG picture."""

import math

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
SIZE, MARGIN, LEGEND = 420, 48, 150
Series = dict[str, list[tuple[float, float]]]


class _Axes:
    """Logarithmic axes, equal in both directions."""

    def __init__(self, values: list[float]) -> None:
        self.low = math.log10(min(values)) - 0.1
        self.high = math.log10(max(values)) + 0.1

    def place(self, value: float) -> float:
        return MARGIN + (math.log10(value) - self.low) / (self.high - self.low) * (SIZE - 2 * MARGIN)

    def line(self, factor: float, *, dashed: bool) -> str:
        ends = [(10**self.low, 10**self.low * factor), (10**self.high, 10**self.high * factor)]
        (x1, y1), (x2, y2) = [(self.place(x), SIZE - self.place(y)) for x, y in ends]
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#94a3b8"{dash}/>'

    def ticks(self) -> list[str]:
        found: list[str] = []
        for power in range(math.ceil(self.low), math.floor(self.high) + 1):
            at, label = self.place(10.0**power), f"{10.0**power:g}"
            found += [
                _text(at, SIZE - MARGIN + 16, label, anchor="middle"),
                _text(MARGIN - 8, SIZE - at + 4, label, anchor="end"),
            ]
        return found


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'


def scatter_svg(title: str, series: Series) -> str:
    """Predicted against published on logarithmic axes, with lines at equality and 20% either way."""
    axes = _Axes([value for points in series.values() for pair in points for value in pair])
    middle = SIZE / 2
    width = SIZE + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {SIZE}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{SIZE}" fill="#ffffff"/>',
        _text(MARGIN, 20, title, more=' font-size="13" font-weight="bold"'),
        axes.line(1.0, dashed=False),
        axes.line(1.2, dashed=True),
        axes.line(1 / 1.2, dashed=True),
        _text(middle, SIZE - 6, "published, seconds per step", anchor="middle"),
        _text(14, middle, "predicted", anchor="middle", more=f' transform="rotate(-90 14 {middle})"'),
        *axes.ticks(),
    ]
    for index, (name, points) in enumerate(sorted(series.items())):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<circle cx="{SIZE + 4}" cy="{60 + 18 * index}" r="4" fill="{colour}"/>')
        parts.append(_text(SIZE + 14, 64 + 18 * index, f"{name} ({len(points)})"))
        parts += [_dot(axes, pair, colour) for pair in points]
    return "\n".join([*parts, "</svg>"])


def _dot(axes: _Axes, pair: tuple[float, float], colour: str) -> str:
    x, y = axes.place(pair[0]), SIZE - axes.place(pair[1])
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
