"""The card that the pages' pictures are drawn on: a frame, a title, boxes, arrows and brackets."""

from collections.abc import Iterable
from math import hypot

from meshwright import svg

# One colour per rank (or coordinate), and the same colours lightened.
RANK_COLOURS = ("#5a8fd0", "#e58a3c", "#6cb670", "#b07fd0")
LIGHT_COLOURS = ("#d3e2f4", "#f8dfc8", "#d6ecd8", "#e8d9f1")
MARGIN = 28


class Card:
    """Collects shapes; `svg` is the file."""

    def __init__(self, width: int, height: int, *, title: str, subtitle: str = "") -> None:
        self.width, self.height, self.title = width, height, title
        self._parts = [
            svg.rect(0.5, 0.5, width - 1, height - 1, rx=8, fill="page", stroke="edge"),
            svg.text(MARGIN, 38, title, size=18, weight=600),
        ]
        if subtitle:
            self.text(MARGIN, 60, subtitle, size=13, fill="soft")

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: float = 12,
        weight: int | None = None,
        fill: str = "ink",
        anchor: str | None = None,
        is_code: bool = False,
    ) -> None:
        """One line of text whose baseline starts, ends or has its middle at x."""
        font = svg.MONOSPACE if is_code else None
        self._parts.append(
            svg.text(x, y, content, size=size, weight=weight, fill=fill, anchor=anchor, font=font)
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str | None = None,
        radius: float = 3,
        is_dashed: bool = False,
    ) -> None:
        """A rectangle."""
        dashes = "4 3" if is_dashed else None
        self._parts.append(
            svg.rect(x, y, width, height, rx=radius, fill=fill, stroke=edge, stroke_dasharray=dashes)
        )

    def shape(self, corners: Iterable[svg.Point], *, fill: str) -> None:
        """A polygon."""
        self._parts.append(svg.polygon(corners, fill=fill))

    def labelled_box(self, x: float, y: float, width: float, height: float, *, fill: str, label: str) -> None:
        """A rectangle of a dark colour with text in its middle."""
        self.box(x, y, width, height, fill=fill)
        self.text(x + width / 2, y + height / 2 + 4.3, label, fill=svg.ON_DARK, anchor="middle")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "faint", width: float = 1.2
    ) -> None:
        """A straight line."""
        self._parts.append(svg.line((x1, y1), (x2, y2), stroke=stroke, stroke_width=width))

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its second end."""
        length = hypot(x2 - x1, y2 - y1)
        along_x, along_y = (x2 - x1) / length, (y2 - y1) / length
        base_x, base_y = x2 - 8 * along_x, y2 - 8 * along_y
        side_x, side_y = -4 * along_y, 4 * along_x
        self.line(x1, y1, base_x, base_y, width=1.4)
        corners = ((x2, y2), (base_x + side_x, base_y + side_y), (base_x - side_x, base_y - side_y))
        self.shape(corners, fill="faint")

    def bracket(self, x1: float, x2: float, y: float, label: str) -> None:
        """A bracket over a horizontal range, with a label above."""
        self.line(x1, y, x2, y)
        self.line(x1, y, x1, y + 6)
        self.line(x2, y, x2, y + 6)
        self.text((x1 + x2) / 2, y - 6, label, anchor="middle", fill="soft")

    def side_bracket(self, x: float, y1: float, y2: float, label: str) -> None:
        """A bracket on the left of a vertical range, with a label outside."""
        self.line(x, y1, x, y2)
        self.line(x, y1, x + 6, y1)
        self.line(x, y2, x + 6, y2)
        self.text(x - 8, (y1 + y2) / 2 + 4, label, anchor="end", fill="soft")

    def add(self, parts: Iterable[str]) -> None:
        """Shapes of meshwright.svg."""
        self._parts.extend(parts)

    def svg(self) -> str:
        """The file."""
        return svg.document(self._parts, self.width, self.height, label=self.title)
