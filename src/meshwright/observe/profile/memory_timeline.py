"""Memory of the recorded steps by category: parameters, gradients, optimizer state, activations, workspace.

Tensors that live before the first recorded step are known by address. Any other allocation is classified by
the phases in which it is made and freed: made in forward and freed in backward is an activation (saved for
backward), made in backward and alive after it is a gradient, made by the optimizer and never freed is its
state, and all else is workspace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.observe.profile.pieces import Phases
from meshwright.observe.profile.trace import MemoryEvent, Trace

CATEGORIES: tuple[str, ...] = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "workspace",
    "other",
)
MOST_POINTS = 400

Known = dict[int, tuple[str, int]]
"""Category and bytes of tensors by address."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes by category over the recorded steps, thinned to the highest instants."""

    times: list[float]
    """Seconds since the first recorded step."""
    bytes_by_category: dict[str, list[int]]
    peak_bytes: int
    peak_at: float
    peak_by_category: dict[str, int]


def memory_timeline(trace: Trace, known: Known) -> MemoryTimeline | None:
    """The memory of a trace; None where no allocation was recorded."""
    steps = trace.steps
    if not trace.memory or not steps:
        return None
    first, last = steps[0].start, steps[-1].end
    events = [event for event in trace.memory if first <= event.at <= last]
    held = dict.fromkeys(CATEGORIES, 0)
    for category, num_bytes in known.values():
        held[category] += num_bytes
    if trace.is_cuda and events:
        before = events[0].total_bytes - events[0].num_bytes
        held["other"] = max(0, before - sum(held.values()))
    categories = _categories(events, Phases(trace), known)
    points = list(_points(events, categories, held))
    return _thinned(points, first)


def _categories(events: Sequence[MemoryEvent], phases: Phases, known: Known) -> list[str]:
    """The category of each event; a free has that of its allocation."""
    found = ["other"] * len(events)
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.address in known and (event.num_bytes < 0 or event.address in live):
            found[index] = known[event.address][0]
        if event.num_bytes > 0:
            live[event.address] = index
            continue
        made = live.pop(event.address, None)
        if made is not None:
            found[made] = found[index] = _category(phases, events[made].at, event.at)
        elif event.address in known:
            found[index] = known[event.address][0]
    for index in live.values():
        found[index] = _category(phases, events[index].at, None)
    return found


def _category(phases: Phases, made: float, freed: float | None) -> str:
    phase = phases.at(made)
    if phase == "forward":
        is_kept = freed is not None and (
            phases.at(freed) != "forward" or _passes_backward(phases, made, freed)
        )
        return "activations" if is_kept else "workspace" if freed is not None else "other"
    if phase == "backward":
        is_left = freed is None or phases.at(freed) in ("update", "data")
        return "gradients" if is_left else "workspace"
    if phase == "update" and freed is None:
        return "optimizer state"
    return "workspace"


def _passes_backward(phases: Phases, made: float, freed: float) -> bool:
    return phases.backward.index(freed) > phases.backward.index(made)


def _points(
    events: Sequence[MemoryEvent], categories: Sequence[str], held: dict[str, int]
) -> Iterable[tuple[float, dict[str, int]]]:
    for event, category in zip(events, categories, strict=True):
        held[category] = max(0, held[category] + event.num_bytes)
        yield event.at, dict(held)


def _thinned(points: list[tuple[float, dict[str, int]]], first: float) -> MemoryTimeline | None:
    """The highest instant of each of at most MOST_POINTS equal groups of events."""
    if not points:
        return None
    size = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    kept = [max(group, key=lambda point: sum(point[1].values())) for group in groups]
    at, peak = max(kept, key=lambda point: sum(point[1].values()))
    used = [name for name in CATEGORIES if any(point[1][name] for point in kept)]
    return MemoryTimeline(
        times=[round(instant - first, 6) for instant, _ in kept],
        bytes_by_category={name: [held[name] for _, held in kept] for name in used},
        peak_bytes=sum(peak.values()),
        peak_at=round(at - first, 6),
        peak_by_category={name: peak[name] for name in used},
    )
