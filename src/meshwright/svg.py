"""SVG pictures as text: elements, axes and legends, with colours for light and for dark pages.

Colours are names of LIGHT and DARK, which a style sheet sets as the reader prefers, or literals such as
`#4c78a8` for data, which look the same on both. Text on a filled shape takes ON_LIGHT or ON_DARK.

`document` is a file of its own. `inline` is for a page with `style_sheet()` in its CSS.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

LIGHT = {
    "page": "#ffffff",
    "panel": "#f7f8fa",
    "empty": "#eef1f4",
    "grid": "#e1e6eb",
    "edge": "#c8ced6",
    "faint": "#66727e",
    "soft": "#56636f",
    "ink": "#1c2733",
    "limit": "#c0392b",
}
DARK = {
    "page": "#161b21",
    "panel": "#1d242c",
    "empty": "#2a333d",
    "grid": "#313c47",
    "edge": "#46525f",
    "faint": "#8895a3",
    "soft": "#a5b1bd",
    "ink": "#e6ebf0",
    "limit": "#e8705f",
}
ON_LIGHT, ON_DARK = "#1c2733", "#ffffff"
PALETTE = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d"),
    *("#c5a3dd", "#ff9da6", "#79706e", "#a0cbe8", "#bab0ac", "#8cd17d", "#d37295", "#f1ce63"),
)
FONT = "-apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif"
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
DASHES = "5 4"

Point = tuple[float, float]


# Elements -------------------------------------------------------------------------------------------------


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """One element. `font_size` becomes font-size, `class_` class; an attribute that is None is left out.

    `fill` and `stroke` take a name of LIGHT, which becomes a class of the style sheet, or any SVG colour.
    """
    classes = [str(attributes.pop("class_"))] if attributes.get("class_") else []
    for name in ("fill", "stroke"):
        if attributes.get(name) in LIGHT:
            classes.append(f"{name}-{attributes.pop(name)}")
    written = {"class": " ".join(classes) or None, **attributes}
    head = "".join(
        f' {name.replace("_", "-")}="{_value(value)}"' for name, value in written.items() if value is not None
    )
    return f"<{tag}{head}>{''.join(children)}</{tag}>" if children else f"<{tag}{head}/>"


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}" if value else "0"


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 13,
    weight: int | None = None,
    fill: str = "ink",
    anchor: str | None = None,
    font: str | None = None,
) -> str:
    """One line of text; `anchor` (start, middle or end) is the part of its baseline that is at x."""
    return element(
        "text",
        escape(content),
        x=x,
        y=y,
        font_size=size,
        font_weight=weight,
        fill=fill,
        text_anchor=anchor,
        font_family=font,
    )


def rect(
    x: float, y: float, width: float, height: float, *, title: str = "", **style: str | float | None
) -> str:
    """A rectangle; `title` is shown while the pointer is on it."""
    tip = [element("title", escape(title))] if title else []
    return element("rect", *tip, x=x, y=y, width=width, height=height, **style)


def line(start: Point, end: Point, *, stroke: str = "grid", **style: str | float | None) -> str:
    """A straight line."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke, **style)


def polyline(points: Iterable[Point], *, stroke: str, **style: str | float | None) -> str:
    """An open line through these points."""
    return element("polyline", points=_points(points), fill="none", stroke=stroke, **style)


def polygon(points: Iterable[Point], **style: str | float | None) -> str:
    """A filled shape with these corners."""
    return element("polygon", points=_points(points), **style)


def circle(centre: Point, radius: float, **style: str | float | None) -> str:
    """A circle."""
    return element("circle", cx=centre[0], cy=centre[1], r=radius, **style)


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


# Files ----------------------------------------------------------------------------------------------------


def style_sheet() -> str:
    """CSS classes of the named colours, for light pages and, where the reader prefers them, dark ones."""
    return f"{_rules(LIGHT)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}"


def _rules(colours: dict[str, str]) -> str:
    return "".join(
        f".fill-{name}{{fill:{colour}}}.stroke-{name}{{stroke:{colour}}}" for name, colour in colours.items()
    )


def inline(
    parts: Iterable[str], width: float, height: float, *, label: str = "", is_stretched: bool = False
) -> str:
    """A picture inside a page with `style_sheet()`; `label` describes it to a screen reader."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label or None,
        preserveAspectRatio="none" if is_stretched else "xMinYMin",
    )


def document(parts: Iterable[str], width: float, height: float, *, label: str = "") -> str:
    """A picture as a file of its own, on a page of its own colour."""
    return (
        element(
            "svg",
            "\n",
            element("style", style_sheet()),
            "\n",
            rect(0, 0, width, height, fill="page"),
            *(f"\n{part}" for part in parts),
            "\n",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width:g} {height:g}",
            width=width,
            role="img",
            aria_label=label or None,
            font_family=FONT,
        )
        + "\n"
    )


# Axes -----------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """Positions of values along one axis: `low` is at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The position of a value."""
        low, high, at = map(math.log, (self.low, self.high, value)) if self.is_log else (*self[:2], value)
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers inside the range, 1, 2 or 5 times a power of ten apart; about so many of them."""
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    steps = (factor * power for factor in (1, 2, 5, 10))
    step = min(steps, key=lambda each: abs((high - low) / each - about))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Division by a whole number avoids 0.30000000000000004.
    return [index * step if step >= 1 else index / round(1 / step) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Plot:
    """The area between an x axis and a y axis."""

    x: Scale
    y: Scale

    def place(self, point: Point) -> Point:
        """The position of a point."""
        return self.x.place(point[0]), self.y.place(point[1])

    def grid(self, ticks: Sequence[float], show: Callable[[float], str]) -> list[str]:
        """A horizontal line with a label on the left for each value of y."""
        parts: list[str] = []
        for tick in ticks:
            up = self.y.place(tick)
            parts.append(line((self.x.start, up), (self.x.end, up)))
            parts.append(text(self.x.start - 8, up + 4, show(tick), size=12, fill="soft", anchor="end"))
        return parts

    def x_labels(self, ticks: Sequence[float], show: Callable[[float], str]) -> list[str]:
        """A mark and a label under the area for each value of x."""
        floor, parts = self.y.start, list[str]()
        for tick in ticks:
            across = self.x.place(tick)
            parts.append(line((across, floor), (across, floor + 5), stroke="faint"))
            parts.append(text(across, floor + 19, show(tick), size=12, fill="soft", anchor="middle"))
        return parts

    def names(self, x: str, y: str) -> list[str]:
        """What the axes show: x below the area, y above its left end."""
        middle = (self.x.start + self.x.end) / 2
        return [
            text(middle, self.y.start + 38, x, size=12, fill="soft", anchor="middle"),
            text(self.x.start - 8, self.y.end - 12, y, size=12, fill="soft"),
        ]

    def line(
        self, points: Iterable[Point], colour: str, *, width: float = 2.0, is_dashed: bool = False
    ) -> str:
        """A line through these points."""
        dashes = DASHES if is_dashed else None
        places = map(self.place, points)
        return polyline(places, stroke=colour, stroke_width=width, stroke_dasharray=dashes)

    def dots(
        self, points: Iterable[Point], colour: str, *, radius: float = 3, opacity: float = 1
    ) -> list[str]:
        """A dot at each of these points."""
        return [circle(self.place(point), radius, fill=colour, fill_opacity=opacity) for point in points]


# Legends --------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One entry of a legend."""

    name: str
    colour: str
    is_dashed: bool = False


def line_legend(entries: Iterable[Entry], x: float, y: float) -> list[str]:
    """Short lines with their names below each other."""
    parts: list[str] = []
    for index, entry in enumerate(entries):
        middle = y + 22 * index
        dashes = DASHES if entry.is_dashed else None
        sample = (x, middle), (x + 26, middle)
        parts.append(line(*sample, stroke=entry.colour, stroke_width=2.5, stroke_dasharray=dashes))
        parts.append(text(x + 34, middle + 4, entry.name, size=12, fill="soft"))
    return parts


def box_legend(entries: Iterable[Entry], *, left: float, right: float, y: float) -> tuple[list[str], float]:
    """Boxes with their names beside each other, in rows from `y` down; and the baseline of the last row."""
    x, parts = left, list[str]()
    for entry in entries:
        width = 28 + 7.0 * len(entry.name)
        if x + width > right and x > left:
            x, y = left, y + 22
        parts.append(rect(x, y - 11, 13, 13, rx=2, fill=entry.colour))
        parts.append(text(x + 19, y, entry.name, size=12, fill="soft"))
        x += width
    return parts, y
