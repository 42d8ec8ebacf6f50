"""Predicted against published values as an SVG picture."""

from meshwright import svg
from meshwright.svg import PALETTE, Plot, Point, Scale

SIZE, LEFT, RIGHT, TOP, BOTTOM, LEGEND = 440, 62, 16, 40, 56, 170
Series = dict[str, list[Point]]


def scatter_svg(title: str, series: Series) -> str:
    """Predicted over published on equal logarithmic axes, with lines at equality and 20% either way."""
    values = [value for points in series.values() for pair in points for value in pair]
    low, high = min(values) / 1.25, max(values) * 1.25
    plot = Plot(
        Scale(low, high, LEFT, SIZE - RIGHT, is_log=True),
        Scale(low, high, SIZE - BOTTOM, TOP, is_log=True),
    )
    ticks = [10.0**power for power in range(-6, 10) if low <= 10.0**power <= high]
    parts = [svg.text(LEFT - 8, 22, title, size=15, weight=600)]
    parts += plot.grid(ticks, "{:g}".format) + plot.x_labels(ticks, "{:g}".format)
    for factor in (1.0, 1.2, 1 / 1.2):
        inside = max(low, low / factor), min(high, high / factor)
        ends = [(x, x * factor) for x in inside]
        parts.append(plot.line(ends, "faint", width=1.0, is_dashed=factor != 1.0))
    parts += plot.names("published, seconds per step", "")
    parts.append(svg.text(LEFT + 6, TOP + 14, "predicted", size=12, fill="soft"))
    for index, (name, points) in enumerate(sorted(series.items())):
        colour, y = PALETTE[index % len(PALETTE)], TOP + 20 + 20 * index
        parts += plot.dots(points, colour, opacity=0.65)
        parts.append(svg.circle((SIZE + 4, y), 4, fill=colour))
        parts.append(svg.text(SIZE + 14, y + 4, f"{name} ({len(points)})", size=12, fill="soft"))
    return svg.document(parts, SIZE + LEGEND, SIZE, label=title)
