"""Charts of measurements: lines over sizes as SVG, bars of characters for a terminal."""

from collections.abc import Mapping, Sequence

from meshwright.plan.draw.charts import Axis, Line, line_chart
from meshwright.svg import PALETTE

Points = Sequence[tuple[float, float]]
HEIGHT = 380
PREDICTED = "model"
"""Lines whose name begins so are predicted, not measured: they are dashed."""


def chart(title: str, lines: Mapping[str, Points], *, x_name: str, y_name: str, is_log: bool = False) -> str:
    """An SVG file with one line for each name, over a linear or logarithmic x."""
    drawn = [
        Line(name, points, PALETTE[index % len(PALETTE)], is_dashed=name.startswith(PREDICTED))
        for index, (name, points) in enumerate(lines.items())
    ]
    x, y = Axis(x_name, show_size, is_log=is_log), Axis(y_name, "{:g}".format)
    return line_chart(drawn, x=x, y=y, title=title, height=HEIGHT).document()


def show_size(count: float) -> str:
    """4096 -> `4096`, 1048576 -> `1Mi`."""
    for size, suffix in ((2**30, "Gi"), (2**20, "Mi"), (2**14, "Ki")):
        unit = 2**10 if suffix == "Ki" else size
        if count >= size:
            return f"{count / unit:g}{suffix}"
    return f"{count:g}"


def bars(values: Sequence[tuple[str, float]], *, width: int = 50) -> str:
    """One line of characters for each value; the largest has `width` of them."""
    longest = max((value for _, value in values), default=1.0) or 1.0
    label = max((len(name) for name, _ in values), default=0)
    return "\n".join(
        f"{name:>{label}} {'#' * round(width * value / longest):<{width}} {value:.4g}"
        for name, value in values
    )
