"""Pictures of a pipeline timeline: letters for a terminal, SVG for everything else."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from rich.text import Text

from meshwright.plan.time.timeline import StageSeconds, TimedAction, Timeline, simulate
from meshwright.plan.workload.schedules import PipelineShape, actions, peak_in_flight
from meshwright.spec.parallel import Schedule

KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
KIND_COLOURS = {
    "F": ("#8db8e8", "#5a8fd0", "#3a6bab", "#264b80"),
    "B": ("#f3b27a", "#e58a3c", "#c0661c", "#8e4a12"),
    "I": ("#f7d58a", "#e9b84a", "#c4922a", "#93691a"),
    "W": ("#a5d6a7", "#6cb670", "#45904b", "#2d6a34"),
}
"""One column per stage of a rank, from the first to the last."""
DARK_FROM_CHUNK = 2
MOST_STAVES = 3
"""A drawing that wraps into more lines than this shows its beginning and its end."""
KIND_STYLES = {
    "F": "black on #8db8e8",
    "B": "black on #f3b27a",
    "I": "black on #f7d58a",
    "W": "black on #a5d6a7",
}


@dataclass(frozen=True)
class Picture:
    """A schedule with the times it is drawn at, in units of one forward of one stage."""

    schedule: Schedule
    shape: PipelineShape
    timeline: Timeline
    in_flight: tuple[float, ...]
    """Per rank: most micro-batches of activations held at once, in stages."""

    def chunk(self, stage: int) -> int:
        """Which of its rank's stages this is, from 0."""
        return stage // self.shape.pp

    @property
    def title(self) -> str:
        """Name and shape in words."""
        shape = self.shape
        chunks = f", {shape.virtual_stages} stages each" if shape.virtual_stages > 1 else ""
        return f"{self.schedule}: {shape.pp} ranks{chunks}, {shape.num_microbatches} micro-batches"

    @property
    def summary(self) -> str:
        """What the picture shows, in numbers."""
        timeline = self.timeline
        held = max(self.in_flight) / self.shape.virtual_stages
        return (
            f"bubble {timeline.bubble_overhead:.1%} over the work "
            f"({timeline.bubble_fraction:.1%} of all time idle); "
            f"a rank holds at most {held:.3g} micro-batches of its activations"
        )


def picture(
    schedule: Schedule,
    shape: PipelineShape,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    hop: float = 0.0,
) -> Picture:
    """The schedule run with equal stages; by default a whole backward takes two forwards."""
    seconds = StageSeconds.uniform(
        shape.num_stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        hop=hop,
    )
    in_flight = tuple(peak_in_flight(rank) for rank in actions(schedule, shape))
    return Picture(schedule, shape, simulate(schedule, shape, seconds), in_flight)


# Terminal --------------------------------------------------------------------------------------------


def draw_text(drawn: Picture, *, width: int = 100) -> Text:
    """The timeline in letters, readable without colour; wrapped like lines of music where it is wide.

    Wide form, where it fits: `F3` is the forward of micro-batch 3. Otherwise one column per unit of
    time, with what is done above and the micro-batch (and stage) below.
    """
    units = round(drawn.timeline.finish_seconds)
    label_width = len(f"rank {drawn.shape.pp - 1}  ")
    cell = len(str(drawn.shape.num_microbatches - 1)) + 2
    text = Text(f"{drawn.title}\n{drawn.summary}\n\n")
    if drawn.shape.virtual_stages == 1 and label_width + units * cell <= width:
        text.append_text(_wide_rows(drawn, units, cell))
    else:
        text.append_text(_narrow_rows(drawn, units, max(20, width - label_width)))
    text.append(f"\n{_legend_words(drawn)}\n")
    return text


def _legend_words(drawn: Picture) -> str:
    kinds = [f"{kind} {KIND_WORDS[kind]}" for kind in _kinds(drawn)]
    return "  ".join([*kinds, "· idle"])


def _kinds(drawn: Picture) -> list[str]:
    used = {timed.action.kind for rank in drawn.timeline.ranks for timed in rank}
    return [kind for kind in KIND_WORDS if kind in used]


def _wide_rows(drawn: Picture, units: int, cell: int) -> Text:
    text = Text()
    for rank, row in enumerate(drawn.timeline.ranks):
        text.append(f"rank {rank}  ")
        at = 0
        for timed in row:
            start, end = round(timed.start), round(timed.end)
            text.append("·".ljust(cell) * (start - at))
            label = f"{timed.action.kind}{timed.action.microbatch}"
            text.append(label.ljust((end - start) * cell - 1), style=KIND_STYLES[timed.action.kind])
            text.append(" ")
            at = end
        text.append("·".ljust(cell) * (units - at) + "\n")
    return text


def _narrow_rows(drawn: Picture, units: int, columns: int) -> Text:
    text = Text()
    staves = list(range(0, units, columns))
    for first in staves if len(staves) <= MOST_STAVES else (staves[0], staves[-1]):
        last = min(first + columns, units)
        if units > columns:
            text.append(f"time {first} to {last} of {units}\n", style="dim")
        for rank, row in enumerate(drawn.timeline.ranks):
            cells = list(_unit_cells(row, units))[first:last]
            for name, line in _narrow_lines(drawn, rank, cells):
                text.append(name)
                text.append_text(line)
                text.append("\n")
    text.append("second line: micro-batch (0-9, a-z, then again from 0)")
    text.append("; third line: stage of the rank\n" if drawn.shape.virtual_stages > 1 else "\n")
    return text


def _unit_cells(row: tuple[TimedAction, ...], units: int) -> Iterator[TimedAction | None]:
    """What a rank does in each unit of time; None is idle."""
    cells: list[TimedAction | None] = [None] * units
    for timed in row:
        for unit in range(round(timed.start), round(timed.end)):
            cells[unit] = timed
    return iter(cells)


def _narrow_lines(drawn: Picture, rank: int, cells: list[TimedAction | None]) -> Iterator[tuple[str, Text]]:
    label = f"rank {rank}".ljust(len(f"rank {drawn.shape.pp - 1}  "))
    blank = " " * len(label)
    yield label, _styled(cells, ["·" if timed is None else timed.action.kind for timed in cells])
    yield (
        blank,
        _styled(cells, [" " if timed is None else _digit(timed.action.microbatch) for timed in cells]),
    )
    if drawn.shape.virtual_stages > 1:
        chunks = [" " if timed is None else _digit(drawn.chunk(timed.action.stage)) for timed in cells]
        yield blank, _styled(cells, chunks)


def _styled(cells: list[TimedAction | None], letters: list[str]) -> Text:
    line = Text()
    for timed, letter in zip(cells, letters, strict=True):
        line.append(letter, style="" if timed is None else KIND_STYLES[timed.action.kind])
    return line


def _digit(number: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[number % 36]


# SVG -------------------------------------------------------------------------------------------------

MARGIN, ROW_HEIGHT, ROW_GAP, HEADER, FOOTER = 24, 30, 6, 74, 62
LABEL_WIDTH, HELD_WIDTH = 58, 120
FONT = "font-family='-apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif'"


def draw_svg(drawn: Picture, *, width: int = 1200) -> str:
    """The timeline as one self-contained SVG file."""
    plot = width - 2 * MARGIN - LABEL_WIDTH - HELD_WIDTH
    scale = plot / drawn.timeline.finish_seconds
    height = HEADER + drawn.shape.pp * (ROW_HEIGHT + ROW_GAP) + FOOTER
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _svg_text(MARGIN, 32, drawn.title, size=18, weight=600, colour="#1c2733"),
        _svg_text(MARGIN, 54, drawn.summary, size=13, colour="#56636f"),
        _svg_text(width - MARGIN - HELD_WIDTH + 16, 66, "held at once", size=11, colour="#7b8794"),
    ]
    for rank in range(drawn.shape.pp):
        parts += _svg_row(drawn, rank, scale, plot)
    parts += _svg_axis(drawn, scale, height)
    parts += _svg_legend(drawn, height)
    return "\n".join([*parts, "</svg>", ""])


def _svg_text(
    x: float, y: float, words: str, *, size: int, weight: int = 400, colour: str, anchor: str = "start"
) -> str:
    style = f"font-size='{size}' font-weight='{weight}' fill='{colour}' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def _svg_row(drawn: Picture, rank: int, scale: float, plot: float) -> list[str]:
    top = HEADER + rank * (ROW_HEIGHT + ROW_GAP)
    left, middle = MARGIN + LABEL_WIDTH, top + ROW_HEIGHT / 2 + 4.5
    parts = [
        _svg_text(MARGIN, middle, f"rank {rank}", size=13, colour="#3c4854"),
        f"<rect x='{left}' y='{top}' width='{plot:.1f}' height='{ROW_HEIGHT}' rx='3' fill='#eef1f4'/>",
    ]
    for timed in drawn.timeline.ranks[rank]:
        parts.append(_svg_action(drawn, timed, left, top, scale))
    return parts + _svg_held(drawn, rank, left + plot + 16, top)


def _svg_action(drawn: Picture, timed: TimedAction, left: float, top: float, scale: float) -> str:
    kind, stage, microbatch = timed.action
    chunk = drawn.chunk(stage)
    x, width = left + timed.start * scale, (timed.end - timed.start) * scale
    gap = min(1.0, width * 0.12)
    colour = KIND_COLOURS[kind][_shade(chunk, drawn.shape.virtual_stages)]
    tip = f"{KIND_WORDS[kind]}, micro-batch {microbatch}, stage {stage}"
    box = (
        f"<rect x='{x:.2f}' y='{top}' width='{width - gap:.2f}' height='{ROW_HEIGHT}' rx='2' "
        f"fill='{colour}'><title>{tip}</title></rect>"
    )
    label = str(microbatch)
    if width < 6.5 * len(label) + 3:
        return box
    ink = "#ffffff" if _shade(chunk, drawn.shape.virtual_stages) >= DARK_FROM_CHUNK else "#1c2733"
    x_middle, y_middle = x + (width - gap) / 2, top + ROW_HEIGHT / 2 + 4
    return box + _svg_text(x_middle, y_middle, label, size=11, colour=ink, anchor="middle")


def _shade(chunk: int, virtual_stages: int) -> int:
    """Spread the stages of a rank over the four shades."""
    if virtual_stages <= 2:
        return chunk * 2 if virtual_stages == 2 else 0
    return chunk * 3 // (virtual_stages - 1)


def _svg_held(drawn: Picture, rank: int, left: float, top: float) -> list[str]:
    """A bar and a number: micro-batches of activations the rank holds at its worst moment."""
    most = max(drawn.in_flight)
    held = drawn.in_flight[rank] / drawn.shape.virtual_stages
    width = 60 * drawn.in_flight[rank] / most
    return [
        f"<rect x='{left:.1f}' y='{top + 9}' width='60' height='12' rx='6' fill='#eef1f4'/>",
        f"<rect x='{left:.1f}' y='{top + 9}' width='{width:.1f}' height='12' rx='6' fill='#8a97a5'/>",
        _svg_text(left + 68, top + ROW_HEIGHT / 2 + 4.5, f"{held:.3g}", size=12, colour="#3c4854"),
    ]


def _svg_axis(drawn: Picture, scale: float, height: int) -> list[str]:
    finish = drawn.timeline.finish_seconds
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if finish / size <= 16)
    left, y = MARGIN + LABEL_WIDTH, height - FOOTER + 14
    parts: list[str] = []
    tick = 0
    while tick <= finish:
        x = left + tick * scale
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y - 14}' y2='{y - 9}' stroke='#a9b4bf'/>")
        parts.append(_svg_text(x, y + 3, str(tick), size=11, colour="#7b8794", anchor="middle"))
        tick += step
    return [*parts, _svg_text(MARGIN, y + 3, "time", size=11, colour="#7b8794")]


def _svg_legend(drawn: Picture, height: int) -> list[str]:
    x, y = float(MARGIN + LABEL_WIDTH), height - 16
    parts: list[str] = []
    entries = [(KIND_COLOURS[kind], KIND_WORDS[kind]) for kind in _kinds(drawn)]
    for colours, words in [*entries, (("#eef1f4",), "idle")]:
        shades = dict.fromkeys(_legend_shades(colours, drawn.shape.virtual_stages))
        for shade in shades:
            parts.append(f"<rect x='{x:.1f}' y='{y - 11}' width='14' height='14' rx='2' fill='{shade}'/>")
            x += 15
        parts.append(_svg_text(x + 5, y, words, size=12, colour="#3c4854"))
        x += 24 + 6.4 * len(words)
    if drawn.shape.virtual_stages > 1:
        parts.append(_svg_text(x + 6, y, "darker: later stage of the rank", size=12, colour="#7b8794"))
    return parts


def _legend_shades(colours: tuple[str, ...], virtual_stages: int) -> list[str]:
    if len(colours) == 1:
        return [colours[0]]
    return [colours[_shade(chunk, virtual_stages)] for chunk in range(virtual_stages)]
