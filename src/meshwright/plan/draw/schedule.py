"""Pictures of a pipeline timeline: text for a terminal, and SVG."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from meshwright import svg
from meshwright.plan.time.timeline import StageSeconds, TimedAction, Timeline, simulate
from meshwright.plan.workload.schedules import PipelineShape, actions, peak_in_flight
from meshwright.spec.parallel import Schedule
from meshwright.svg import Scale

KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
KIND_COLOURS = {
    "F": ("#8db8e8", "#5a8fd0", "#3a6bab", "#264b80"),
    "B": ("#f3b27a", "#e58a3c", "#c0661c", "#8e4a12"),
    "I": ("#f7d58a", "#e9b84a", "#c4922a", "#93691a"),
    "W": ("#a5d6a7", "#6cb670", "#45904b", "#2d6a34"),
}
"""Four shades per kind of action: later stages of a rank are darker."""
DARK_FROM_SHADE = 2
MOST_WRAPPED_LINES = 3
"""A drawing that wraps into more lines than this shows its beginning and its end."""
KIND_STYLES = {
    "F": "black on #8db8e8",
    "B": "black on #f3b27a",
    "I": "black on #f7d58a",
    "W": "black on #a5d6a7",
}


@dataclass(frozen=True)
class Picture:
    """A schedule with its timeline, in units of one forward of one stage."""

    schedule: Schedule
    shape: PipelineShape
    timeline: Timeline
    in_flight: tuple[float, ...]
    """Most micro-batches whose activations each rank keeps at the same time, counted per stage."""
    unit: float = 1.0
    """Time of one column of the text: every action takes a whole number of them, or nearly."""

    def chunk(self, stage: int) -> int:
        """The index of a stage among the stages of its rank."""
        return stage // self.shape.pp

    @property
    def title(self) -> str:
        """The schedule and its shape in one line."""
        shape = self.shape
        chunks = f", {shape.virtual_stages} stages each" if shape.virtual_stages > 1 else ""
        return f"{self.schedule}: {shape.pp} ranks{chunks}, {shape.num_microbatches} micro-batches"

    @property
    def summary(self) -> str:
        """Bubble and peak activations in one line."""
        timeline = self.timeline
        peak = max(self.in_flight) / self.shape.virtual_stages
        return (
            f"bubble {timeline.bubble_overhead:.1%} of the compute time "
            f"({timeline.bubble_fraction:.1%} of all time idle); "
            f"activations of at most {peak:.3g} micro-batches per rank"
        )

    @property
    def peaks(self) -> str:
        """Peak activations of every rank in one line, in micro-batches of all its stages."""
        counts = [f"{peak / self.shape.virtual_stages:.3g}" for peak in self.in_flight]
        return f"peak activations by rank, in micro-batches: {', '.join(counts)}"


@dataclass(frozen=True)
class Costs:
    """Time of one micro-batch in each stage, in model order; one value stands for all stages."""

    forward: tuple[float, ...] = (1.0,)
    backward: tuple[float, ...] = (2.0,)
    """The full backward: input gradient and weight gradient."""
    weight: tuple[float, ...] = (1.0,)
    """The weight gradient's part of the backward."""
    hop: float = 0.0
    """Time from the end of an action until another rank has its result."""

    def of_stages(self, num_stages: int) -> StageSeconds:
        """The time of every stage."""
        forward, backward, weight = (
            np.array(values * num_stages if len(values) == 1 else values, np.float64)
            for values in (self.forward, self.backward, self.weight)
        )
        return StageSeconds(forward, backward - weight, weight, self.hop)


def picture(schedule: Schedule, shape: PipelineShape, costs: Costs | None = None) -> Picture:
    """The picture of a schedule; by default stages are equal and a full backward takes two forwards."""
    seconds = (costs or Costs()).of_stages(shape.num_stages)
    in_flight = tuple(peak_in_flight(rank) for rank in actions(schedule, shape))
    durations = np.concatenate([seconds.forward, seconds.backward_input, seconds.backward_weight])
    timeline = simulate(schedule, shape, seconds)
    return Picture(schedule, shape, timeline, in_flight, _unit(durations.tolist()))


def _unit(durations: list[float]) -> float:
    """The largest of some parts of the shortest duration of which all are multiples, or half of it."""
    positive = sorted({one for one in durations if one > 0})
    for parts in range(1, 5):
        unit = positive[0] / parts
        if all(abs(one / unit - round(one / unit)) < 0.01 for one in positive):
            return unit
    return positive[0] / 2


# Terminal --------------------------------------------------------------------------------------------


def draw_text(drawn: Picture, *, width: int = 100) -> Text:
    """The timeline as text, readable without colour.

    Where it fits, `F3` is the forward of micro-batch 3. Otherwise there is one column per unit of time, with
    the kind of action above and the micro-batch (and stage) below, wrapped into several lines.
    """
    units = round(drawn.timeline.finish_seconds / drawn.unit)
    label_width = len(f"rank {drawn.shape.pp - 1}  ")
    cell = len(str(drawn.shape.num_microbatches - 1)) + 2
    text = Text(f"{drawn.title}\n{drawn.summary}\n{drawn.peaks}\n\n")
    if drawn.shape.virtual_stages == 1 and label_width + units * cell <= width:
        text.append_text(_labelled_rows(drawn, units, cell))
    else:
        text.append_text(_column_rows(drawn, units, max(20, width - label_width)))
    text.append(f"\n{_legend_text(drawn)}\n")
    return text


def _legend_text(drawn: Picture) -> str:
    kinds = [f"{kind} {KIND_NAMES[kind]}" for kind in _kinds(drawn)]
    return "  ".join([*kinds, "· idle"])


def _kinds(drawn: Picture) -> list[str]:
    used = {timed.action.kind for rank in drawn.timeline.ranks for timed in rank}
    return [kind for kind in KIND_NAMES if kind in used]


def _labelled_rows(drawn: Picture, units: int, cell: int) -> Text:
    text = Text()
    for rank, row in enumerate(drawn.timeline.ranks):
        text.append(f"rank {rank}  ")
        at = 0
        for timed in row:
            start, end = round(timed.start / drawn.unit), round(timed.end / drawn.unit)
            text.append("·".ljust(cell) * (start - at))
            label = f"{timed.action.kind}{timed.action.microbatch}"
            text.append(label.ljust((end - start) * cell - 1), style=KIND_STYLES[timed.action.kind])
            text.append(" ")
            at = end
        text.append("·".ljust(cell) * (units - at) + "\n")
    return text


def _column_rows(drawn: Picture, units: int, columns: int) -> Text:
    text = Text()
    starts = list(range(0, units, columns))
    for first in starts if len(starts) <= MOST_WRAPPED_LINES else (starts[0], starts[-1]):
        last = min(first + columns, units)
        if units > columns:
            text.append(f"time {first} to {last} of {units}\n", style="dim")
        for rank, row in enumerate(drawn.timeline.ranks):
            cells = list(_unit_cells(row, units, drawn.unit))[first:last]
            for name, line in _column_lines(drawn, rank, cells):
                text.append(name)
                text.append_text(line)
                text.append("\n")
    text.append("second line: micro-batch (0-9, a-z, then again from 0)")
    text.append("; third line: stage of the rank\n" if drawn.shape.virtual_stages > 1 else "\n")
    return text


def _unit_cells(row: tuple[TimedAction, ...], units: int, size: float) -> Iterator[TimedAction | None]:
    """The action of a rank in each unit of time; None is idle."""
    cells: list[TimedAction | None] = [None] * units
    for timed in row:
        for unit in range(round(timed.start / size), min(units, round(timed.end / size))):
            cells[unit] = timed
    return iter(cells)


def _column_lines(drawn: Picture, rank: int, cells: list[TimedAction | None]) -> Iterator[tuple[str, Text]]:
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

WIDTH, MARGIN, ROW_HEIGHT, ROW_GAP, HEADER, FOOTER = 1200, 24, 30, 6, 74, 62
LABEL_WIDTH, PEAK_WIDTH, PEAK_BAR = 58, 120, 60
LEFT, PLOT_WIDTH = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - PEAK_WIDTH


def draw_svg(drawn: Picture) -> str:
    """The timeline as an SVG file."""
    return svg.document(_svg_parts(drawn), WIDTH, _height(drawn), label=drawn.title)


def inline_svg(drawn: Picture) -> str:
    """The timeline inside a page."""
    return svg.inline(_svg_parts(drawn), WIDTH, _height(drawn), label=drawn.title)


def _height(drawn: Picture) -> int:
    return HEADER + drawn.shape.pp * (ROW_HEIGHT + ROW_GAP) + FOOTER


def _svg_parts(drawn: Picture) -> list[str]:
    peak_x = WIDTH - MARGIN - PEAK_WIDTH + 16
    scale = Scale(0.0, drawn.timeline.finish_seconds, LEFT, LEFT + PLOT_WIDTH)
    parts = [
        svg.text(MARGIN, 32, drawn.title, size=18, weight=600),
        svg.text(MARGIN, 54, drawn.summary, fill="soft"),
        svg.text(peak_x, 66, "peak in flight", size=11, fill="faint"),
    ]
    for rank in range(drawn.shape.pp):
        top = HEADER + rank * (ROW_HEIGHT + ROW_GAP)
        middle = top + ROW_HEIGHT / 2 + 4.5
        parts.append(svg.text(MARGIN, middle, f"rank {rank}", fill="soft"))
        parts.append(svg.rect(LEFT, top, PLOT_WIDTH, ROW_HEIGHT, rx=3, fill="empty"))
        parts += [part for timed in drawn.timeline.ranks[rank] for part in _action(drawn, timed, top, scale)]
        parts += _peak(drawn, rank, peak_x, top)
    bottom = _height(drawn) - FOOTER
    return [*parts, *_time_axis(drawn, scale, bottom), *_svg_legend(drawn, bottom + 46)]


def _action(drawn: Picture, timed: TimedAction, top: float, scale: Scale) -> Iterator[str]:
    """The box of one action, with its micro-batch where that fits."""
    kind, stage, microbatch = timed.action
    shade = _shade(drawn.chunk(stage), drawn.shape.virtual_stages)
    x = scale.place(timed.start)
    width = scale.place(timed.end) - x
    gap = min(1.0, width * 0.12)
    tip = f"{KIND_NAMES[kind]}, micro-batch {microbatch}, stage {stage}"
    yield svg.rect(x, top, width - gap, ROW_HEIGHT, rx=2, fill=KIND_COLOURS[kind][shade], title=tip)
    label = str(microbatch)
    if width >= 6.5 * len(label) + 3:
        ink = svg.ON_DARK if shade >= DARK_FROM_SHADE else svg.ON_LIGHT
        middle = x + (width - gap) / 2
        yield svg.text(middle, top + ROW_HEIGHT / 2 + 4, label, size=11, fill=ink, anchor="middle")


def _shade(chunk: int, virtual_stages: int) -> int:
    """The shade of a rank's stage: its stages are spread over the four shades."""
    if virtual_stages <= 2:
        return chunk * 2 if virtual_stages == 2 else 0
    return chunk * 3 // (virtual_stages - 1)


def _peak(drawn: Picture, rank: int, left: float, top: float) -> list[str]:
    """A bar and a number: most micro-batches whose activations the rank keeps at the same time."""
    share = drawn.in_flight[rank] / max(drawn.in_flight)
    count = drawn.in_flight[rank] / drawn.shape.virtual_stages
    return [
        svg.rect(left, top + 9, PEAK_BAR, 12, rx=6, fill="empty"),
        svg.rect(left, top + 9, PEAK_BAR * share, 12, rx=6, fill="faint"),
        svg.text(left + PEAK_BAR + 8, top + ROW_HEIGHT / 2 + 4.5, f"{count:.3g}", size=12, fill="soft"),
    ]


def _time_axis(drawn: Picture, scale: Scale, y: float) -> list[str]:
    parts = [svg.text(MARGIN, y + 17, "time", size=11, fill="faint")]
    for tick in svg.round_ticks(0.0, drawn.timeline.finish_seconds, about=12):
        x = scale.place(tick)
        parts.append(svg.line((x, y), (x, y + 5), stroke="faint"))
        parts.append(svg.text(x, y + 17, f"{tick:g}", size=11, fill="faint", anchor="middle"))
    return parts


def _svg_legend(drawn: Picture, y: float) -> list[str]:
    stages, x = drawn.shape.virtual_stages, float(LEFT)
    shades = list(dict.fromkeys(_shade(chunk, stages) for chunk in range(stages)))
    entries = [(KIND_NAMES[kind], [KIND_COLOURS[kind][shade] for shade in shades]) for kind in _kinds(drawn)]
    parts: list[str] = []
    for name, colours in [*entries, ("idle", ["empty"])]:
        for colour in colours:
            parts.append(svg.rect(x, y - 11, 14, 14, rx=2, fill=colour))
            x += 15
        parts.append(svg.text(x + 5, y, name, size=12, fill="soft"))
        x += 24 + 6.4 * len(name)
    if stages > 1:
        parts.append(svg.text(x + 6, y, "darker: later stage of the rank", size=12, fill="faint"))
    return parts
