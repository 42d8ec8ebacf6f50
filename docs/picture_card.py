"""A light card that pictures are drawn on: plain SVG, no fonts of its own, readable on dark pages too."""

from html import escape
from math import hypot

INK, SOFT, FAINT = "#1c2733", "#56636f", "#7b8794"
EMPTY, EDGE = "#eef1f4", "#d7dde3"
# One colour per rank (or coordinate), and the same colours lightened.
RANK_COLOURS = ("#5a8fd0", "#e58a3c", "#6cb670", "#b07fd0")
LIGHT_COLOURS = ("#d3e2f4", "#f8dfc8", "#d6ecd8", "#e8d9f1")
FONT = "-apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif"
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
MARGIN = 28


class Card:
    """Collects shapes; `svg` is the whole file."""

    def __init__(self, width: int, height: int, *, title: str, subtitle: str = "") -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        self.text(MARGIN, 38, title, size=18, weight=600)
        if subtitle:
            self.text(MARGIN, 60, subtitle, size=13, colour=SOFT)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        weight: int = 400,
        colour: str = INK,
        anchor: str = "start",
        is_code: bool = False,
    ) -> None:
        """Words whose baseline starts, ends or has its middle at x."""
        font = f" font-family='{MONOSPACE}'" if is_code else ""
        self._parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' fill='{colour}' "
            f"text-anchor='{anchor}'{font}>{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str = "none",
        radius: float = 3,
        is_dashed: bool = False,
    ) -> None:
        """A rectangle."""
        dash = " stroke-dasharray='4 3'" if is_dashed else ""
        self._parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='{radius}' "
            f"fill='{fill}' stroke='{edge}'{dash}/>"
        )

    def labelled_box(
        self, x: float, y: float, width: float, height: float, *, fill: str, label: str, ink: str = "#ffffff"
    ) -> None:
        """A rectangle with words in its middle."""
        self.box(x, y, width, height, fill=fill)
        self.text(x + width / 2, y + height / 2 + 4.3, label, colour=ink, anchor="middle")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = FAINT, width: float = 1.2
    ) -> None:
        """A straight line."""
        self._parts.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
            f"stroke-width='{width}'/>"
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = FAINT, width: float = 1.4
    ) -> None:
        """A line whose second end has a head."""
        length = hypot(x2 - x1, y2 - y1)
        along_x, along_y = (x2 - x1) / length, (y2 - y1) / length
        base_x, base_y = x2 - 8 * along_x, y2 - 8 * along_y
        side_x, side_y = -4 * along_y, 4 * along_x
        self.line(x1, y1, base_x, base_y, colour=colour, width=width)
        corners = ((x2, y2), (base_x + side_x, base_y + side_y), (base_x - side_x, base_y - side_y))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f"<polygon points='{points}' fill='{colour}'/>")

    def bracket(self, x1: float, x2: float, y: float, words: str, *, colour: str = FAINT) -> None:
        """A bracket over a horizontal range, its words above."""
        self.line(x1, y, x2, y, colour=colour)
        self.line(x1, y, x1, y + 6, colour=colour)
        self.line(x2, y, x2, y + 6, colour=colour)
        self.text((x1 + x2) / 2, y - 6, words, anchor="middle", colour=SOFT)

    def side_bracket(self, x: float, y1: float, y2: float, words: str, *, is_left: bool) -> None:
        """A bracket beside a vertical range, its words outside."""
        tip = 6 if is_left else -6
        self.line(x, y1, x, y2)
        self.line(x, y1, x + tip, y1)
        self.line(x, y2, x + tip, y2)
        anchor = "end" if is_left else "start"
        self.text(x - (tip + 2 if is_left else tip - 2), (y1 + y2) / 2 + 4, words, anchor=anchor, colour=SOFT)

    def svg(self) -> str:
        """The file."""
        frame = (
            f"<rect x='0.5' y='0.5' width='{self.width - 1}' height='{self.height - 1}' rx='8' "
            f"fill='#ffffff' stroke='{EDGE}'/>"
        )
        opening = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' font-family='{FONT}' role='img'>"
        )
        return "\n".join([opening, f"<title>{escape(self.title)}</title>", frame, *self._parts, "</svg>", ""])
