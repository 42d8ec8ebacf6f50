"""Lines over sizes as a stand-alone SVG, and bars of characters for a terminal."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from meshwright.plan.draw.charts import PALETTE

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 940, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 220, 40, 50
_STYLE = "text{font:13px sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.grid{stroke:#e2e2e2}"
_MOST_MARKS = 9


def chart(
    title: str, lines: Mapping[str, Points], *, x_words: str, y_words: str, is_log: bool = False
) -> str:
    """Lines from zero up, over a linear or logarithmic x; a dotted line for names that begin with `model`."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    high = max((y for points in lines.values() for _, y in points), default=1.0) * 1.08 or 1.0
    place = _place(xs, high, is_log=is_log)
    parts = [_text(LEFT, 22, title, kind="title"), *_grid(xs, high, place)]
    for index, (name, points) in enumerate(lines.items()):
        parts += _line(name, [place(*point) for point in points], PALETTE[index % len(PALETTE)], index)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_words, anchor="middle"))
    parts.append(_text(WIDTH - RIGHT + 24, TOP, y_words))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return (
        f'{head}<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _place(
    xs: Sequence[float], high: float, *, is_log: bool
) -> Callable[[float, float], tuple[float, float]]:
    def along(x: float) -> float:
        return math.log(x) if is_log else x

    first, last = (along(xs[0]), along(xs[-1])) if xs else (0.0, 1.0)
    reach = (last - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (along(x) - first) / reach
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / high * (HEIGHT - BOTTOM - TOP)

    return place


def _grid(
    xs: Sequence[float], high: float, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    parts = []
    every = max(1, -(-len(xs) // _MOST_MARKS))
    for x in xs[::every]:
        across, floor = place(x, 0.0)
        parts.append(_text(across, floor + 20, show_size(x), anchor="middle"))
    step = _round_step(high)
    for index in range(int(high / step) + 1):
        _, up = place(xs[0], index * step) if xs else (0.0, 0.0)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}" class="grid"/>')
        parts.append(_text(LEFT - 8, up + 4, f"{index * step:g}", anchor="end"))
    return parts


def _round_step(high: float) -> float:
    power = 10.0 ** math.floor(math.log10(high))
    return next(size * power for size in (0.1, 0.2, 0.5, 1.0, 2.0) if high / (size * power) <= 6)


def _line(name: str, places: list[tuple[float, float]], colour: str, index: int) -> list[str]:
    dash = ' stroke-dasharray="4 4"' if name.startswith("model") else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    stroke = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
    x, y = WIDTH - RIGHT + 24, TOP + 24 + 22 * index
    return [
        f'<polyline points="{path}" {stroke}/>',
        f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" {stroke}/>',
        _text(x + 34, y, name),
    ]


def _text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def show_size(count: float) -> str:
    """4096 -> `4096`, 1048576 -> `1Mi`."""
    for size, suffix in ((2**30, "Gi"), (2**20, "Mi"), (2**14, "Ki")):
        unit = 2**10 if suffix == "Ki" else size
        if count >= size:
            return f"{count / unit:g}{suffix}"
    return f"{count:g}"


def bars(values: Sequence[tuple[str, float]], *, width: int = 50) -> str:
    """One line of characters for each value, the largest `width` long."""
    longest = max((value for _, value in values), default=1.0) or 1.0
    label = max((len(name) for name, _ in values), default=0)
    return "\n".join(
        f"{name:>{label}} {'#' * round(width * value / longest):<{width}} {value:.4g}"
        for name, value in values
    )
