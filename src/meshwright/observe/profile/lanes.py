"""The last recorded step as a picture needs it: a lane per stream or thread, runs of one class merged."""

from collections.abc import Iterable

from meshwright.observe.profile.kernel_classes import OTHER
from meshwright.observe.profile.pieces import Piece
from meshwright.observe.profile.trace import Trace

MOST_SPANS = 900
MOST_LANES = 6

Span = tuple[str, float, float]
"""Class, start and end in seconds since the start of the step."""


def step_lanes(trace: Trace, pieces: Iterable[Piece]) -> dict[str, list[Span]]:
    """Spans of the last step by lane, the busiest lanes first."""
    steps = trace.steps
    if not steps:
        return {}
    start, end = steps[-1].start, steps[-1].end
    end = max(end, max((piece.end for piece in pieces), default=end)) if trace.is_cuda else end
    by_lane: dict[str, list[Span]] = {}
    for piece in pieces:
        if piece.start >= start and piece.end <= end and _is_drawn(piece, trace):
            name = f"stream {piece.lane}" if trace.is_cuda else "operators"
            by_lane.setdefault(name, []).append((piece.kind, piece.start - start, piece.end - start))
    lanes = sorted(by_lane.items(), key=lambda item: -sum(b - a for _, a, b in item[1]))[:MOST_LANES]
    return {name: merged(spans, (end - start) / MOST_SPANS) for name, spans in lanes}


def _is_drawn(piece: Piece, trace: Trace) -> bool:
    """Kernels, or outermost operators of a CPU: what an operator calls is inside it."""
    if trace.is_cuda:
        return True
    if piece.kind == OTHER or piece.op is None:
        return False
    return piece.op.inner_seconds < 0.5 * (piece.end - piece.start)


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Neighbours of one class as one span, where less than `gap` is between them; short ones are dropped."""
    found: list[Span] = []
    for kind, start, end in sorted(spans, key=lambda span: span[1]):
        if found and found[-1][0] == kind and start - found[-1][2] <= gap:
            found[-1] = (kind, found[-1][1], max(end, found[-1][2]))
        elif end - start >= gap / 4:
            found.append((kind, start, end))
    return [(kind, round(start, 7), round(end, 7)) for kind, start, end in found]
