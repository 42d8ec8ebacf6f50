"""Predicted against published as an SVG picture."""

import math

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
SIZE, MARGIN, LEGEND = 420, 48, 150


def scatter_svg(title: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """Predicted against published on logarithmic axes, with lines at equality and 20% either way."""
    size, margin = 420, 48
    values = [value for points in series.values() for pair in points for value in pair]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def place(value: float) -> float:
        return margin + (math.log10(value) - low) / (high - low) * (size - 2 * margin)

    def line(factor: float, dash: str) -> str:
        ends = [(10**low, 10**low * factor), (10**high, 10**high * factor)]
        (x1, y1), (x2, y2) = [(place(x), size - place(y)) for x, y in ends]
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#94a3b8" {dash}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 150} {size}" font-family="sans-serif" font-size="11">',
        f'<rect width="{size + 150}" height="{size}" fill="#ffffff"/>',
        f'<text x="{margin}" y="20" font-size="13" font-weight="bold">{title}</text>',
        line(1.0, ""),
        line(1.2, 'stroke-dasharray="4 4"'),
        line(1 / 1.2, 'stroke-dasharray="4 4"'),
        f'<text x="{size / 2}" y="{size - 6}" text-anchor="middle">published, seconds per step</text>',
        f'<text x="14" y="{size / 2}" text-anchor="middle" transform="rotate(-90 14 {size / 2})">predicted</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = place(10**power)
        parts.append(
            f'<text x="{at:.1f}" y="{size - margin + 16}" text-anchor="middle">{10.0**power:g}</text>'
        )
        parts.append(
            f'<text x="{margin - 8}" y="{size - at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for index, (name, points) in enumerate(sorted(series.items())):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<circle cx="{size + 4}" cy="{60 + 18 * index}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{size + 14}" y="{64 + 18 * index}">{name} ({len(points)})</text>')
        parts += [
            f'<circle cx="{place(x):.1f}" cy="{size - place(y):.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
            for x, y in points
        ]
    return "\n".join([*parts, "</svg>"])
