"""Pictures of a profile: the step by lane, memory over time, and the pipeline beside its prediction."""

from collections.abc import Mapping
from typing import Any

from meshwright import svg
from meshwright.observe.profile.kernel_classes import CLASSES, TITLES
from meshwright.observe.profile.memory_timeline import CATEGORIES
from meshwright.observe.profile.pipeline_timeline import shape_of, timelines
from meshwright.plan.draw.charts import Bar, stacked_bars
from meshwright.plan.draw.schedule import KIND_COLOURS, KIND_NAMES
from meshwright.plan.time.timeline import TimedAction
from meshwright.svg import PALETTE, Entry, Plot, Scale, round_ticks
from meshwright.units import show_bytes, show_seconds

WIDTH, LABEL_WIDTH, LANE_HEIGHT, LANE_GAP = 940, 100, 26, 8
COLOURS = {kind: PALETTE[index] for index, kind in enumerate(CLASSES)}
MEMORY_COLOURS = dict(zip(CATEGORIES, (PALETTE[i] for i in (0, 5, 2, 1, 6, 10)), strict=True))
_MEMORY_HEIGHT = 240
_ROW_HEIGHT, _PAIR_GAP = 20, 14


def lanes_picture(document: Mapping[str, Any]) -> str:
    """The last recorded step: one row per stream or thread, coloured by operator class."""
    lanes: Mapping[str, list[Any]] = document["lanes"]
    if not lanes:
        return ""
    end = max(span[2] for spans in lanes.values() for span in spans)
    scale = Scale(0.0, end or 1.0, LABEL_WIDTH, WIDTH - 12)
    parts: list[str] = []
    for index, (name, spans) in enumerate(lanes.items()):
        top = 6 + index * (LANE_HEIGHT + LANE_GAP)
        parts.append(svg.text(4, top + 17, name, size=12, fill="soft"))
        parts.append(svg.rect(LABEL_WIDTH, top, WIDTH - 12 - LABEL_WIDTH, LANE_HEIGHT, fill="empty"))
        parts += [_span(kind, start, stop, top, scale) for kind, start, stop in spans]
    bottom = 6 + len(lanes) * (LANE_HEIGHT + LANE_GAP)
    parts += _time_axis(scale, bottom, end)
    used = [kind for kind in CLASSES if any(span[0] == kind for spans in lanes.values() for span in spans)]
    entries = [Entry(kind, COLOURS[kind]) for kind in used]
    legend, last = svg.box_legend(
        [*entries, Entry("idle", "empty")], left=LABEL_WIDTH, right=WIDTH, y=bottom + 48
    )
    return svg.inline([*parts, *legend], WIDTH, last + 12, label="The last recorded step by operator class")


def _span(kind: str, start: float, stop: float, top: float, scale: Scale) -> str:
    x = scale.place(start)
    width = max(0.4, scale.place(stop) - x)
    tip = f"{kind}, {show_seconds(stop - start)}"
    return svg.rect(x, top, width, LANE_HEIGHT, fill=COLOURS[kind], title=tip)


def _time_axis(scale: Scale, y: float, end: float) -> list[str]:
    parts: list[str] = []
    for tick in round_ticks(0.0, end, about=8) if end > 0 else ():
        x = scale.place(tick)
        parts.append(svg.line((x, y), (x, y + 5), stroke="faint"))
        label = "0" if not tick else show_seconds(tick)
        parts.append(svg.text(x, y + 18, label, size=11, fill="faint", anchor="middle"))
    return parts


def breakdown_picture(document: Mapping[str, Any]) -> str:
    """One bar: where the step goes."""
    parts = {name: seconds for name, seconds in document["breakdown"].items() if seconds > 0}
    total = document["shares_of_seconds"]
    bar = Bar("one step", parts, show_seconds(total))
    return stacked_bars([bar], full=max(total, sum(parts.values())), label="Where a step goes").inline()


def classes_picture(document: Mapping[str, Any]) -> str:
    """Two bars: the operator classes by time and by FLOPs."""
    rows = {row["kind"]: row for row in document["classes"]}
    keys = {"time": "seconds", "FLOPs": "flops"}
    bars = [Bar(name, _class_shares(rows, key), "") for name, key in keys.items()]
    return stacked_bars(bars, full=1.0, label="Operator classes by time and by FLOPs").inline()


def _class_shares(rows: Mapping[str, Any], key: str) -> dict[str, float]:
    """Share of every class by its title, in the order of CLASSES, which the colours follow."""
    values = {kind: rows[kind][key] or 0.0 if kind in rows else 0.0 for kind in CLASSES}
    total = sum(values.values()) or 1.0
    return {TITLES[kind]: value / total for kind, value in values.items()}


def memory_picture(memory: Mapping[str, Any]) -> str:
    """Allocated bytes over the recorded steps, stacked by category."""
    times, series = memory["times"], memory["bytes_by_category"]
    if len(times) < 2:
        return ""
    x = Scale(times[0], times[-1], 84, WIDTH - 16)
    y = Scale(0.0, memory["peak_bytes"] * 1.05 or 1.0, _MEMORY_HEIGHT, 16)
    plot = Plot(x, y)
    parts = plot.grid(round_ticks(0.0, y.high, about=4), show_bytes)
    below = [0.0] * len(times)
    for name in series:
        above = [base + value for base, value in zip(below, series[name], strict=True)]
        corners = [plot.place(point) for point in zip(times, above, strict=True)]
        corners += [plot.place(point) for point in reversed(list(zip(times, below, strict=True)))]
        parts.append(svg.polygon(corners, fill=MEMORY_COLOURS[name], fill_opacity=0.9))
        below = above
    parts += plot.x_labels(
        round_ticks(times[0], times[-1], about=7), lambda at: show_seconds(at) if at else "0"
    )
    entries = [Entry(name, MEMORY_COLOURS[name]) for name in series]
    legend, last = svg.box_legend(entries, left=84, right=WIDTH, y=_MEMORY_HEIGHT + 48)
    return svg.inline([*parts, *legend], WIDTH, last + 12, label="Memory by category over the recorded steps")


def _pipeline_parts(document: Mapping[str, Any]) -> tuple[list[str], float]:
    measured, predicted = timelines(document)
    end = max(measured.finish_seconds, predicted.finish_seconds)
    scale = Scale(0.0, end, LABEL_WIDTH + 70, WIDTH - 12)
    parts: list[str] = []
    top = 34.0
    schedule, _ = shape_of(document)
    title = (
        f"{schedule}: measured {show_seconds(document['measured_seconds'])}, "
        f"the schedule with these stage times {show_seconds(document['predicted_seconds'])}"
    )
    parts.append(svg.text(4, 16, title, size=13, weight=600))
    for index, rank in enumerate(document["ranks"]):
        parts.append(svg.text(4, top + _ROW_HEIGHT, f"rank {rank['rank']}", size=12, fill="soft"))
        for name, row in (("measured", measured.ranks[index]), ("predicted", predicted.ranks[index])):
            parts.append(svg.text(LABEL_WIDTH - 34, top + 14, name, size=11, fill="faint"))
            width = WIDTH - 12 - scale.start
            parts.append(svg.rect(scale.start, top, width, _ROW_HEIGHT, fill="empty"))
            opacity = 1.0 if name == "measured" else 0.55
            parts += [part for timed in row for part in _action(timed, top, scale, opacity)]
            top += _ROW_HEIGHT + 2
        top += _PAIR_GAP
    parts += _time_axis(scale, top - 6, end)
    used = dict.fromkeys(timed.action.kind for row in measured.ranks for timed in row)
    entries = [Entry(KIND_NAMES[kind], KIND_COLOURS[kind][0]) for kind in KIND_NAMES if kind in used]
    legend, last = svg.box_legend(
        [*entries, Entry("idle", "empty")], left=scale.start, right=WIDTH, y=top + 40
    )
    return [*parts, *legend], last + 12


def _action(timed: TimedAction, top: float, scale: Scale, opacity: float) -> list[str]:
    kind, stage, microbatch = timed.action
    x = scale.place(timed.start)
    width = max(0.5, scale.place(timed.end) - x)
    seconds = show_seconds(timed.end - timed.start)
    tip = f"{KIND_NAMES[kind]}, micro-batch {microbatch}, stage {stage}: {seconds}"
    colour = KIND_COLOURS[kind][0]
    box = svg.rect(
        x, top, width - min(0.8, width * 0.1), _ROW_HEIGHT, rx=2, fill=colour, fill_opacity=opacity, title=tip
    )
    label = str(microbatch)
    if width < 7 * len(label) + 3 or opacity < 1:
        return [box]
    return [box, svg.text(x + width / 2, top + 14, label, size=11, fill=svg.ON_LIGHT, anchor="middle")]


def pipeline_picture(document: Mapping[str, Any]) -> str:
    """The pipeline inside a page: each rank measured, and below it as the schedule predicts."""
    parts, height = _pipeline_parts(document)
    return svg.inline(parts, WIDTH, height, label="The pipeline, measured and predicted")


def pipeline_svg(document: Mapping[str, Any]) -> str:
    """The pipeline as a file of its own."""
    parts, height = _pipeline_parts(document)
    return svg.document(parts, WIDTH, height, label="The pipeline, measured and predicted")
