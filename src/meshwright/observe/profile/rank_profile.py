"""What one rank's trace says about its step: a pure function over parsed events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.observe.profile.intervals import Interval, length, union, within, without
from meshwright.observe.profile.kernel_classes import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    COPY,
    MATMUL,
    OTHER,
    class_of_op,
    uses_tensor_cores,
)
from meshwright.observe.profile.matmuls import MatmulRow, Missed, matmul_rows, missed_matmuls
from meshwright.observe.profile.memory_timeline import Known, MemoryTimeline, memory_timeline
from meshwright.observe.profile.operator_work import matmul_shape, work_of
from meshwright.observe.profile.pieces import PHASES, Piece, pieces_of
from meshwright.observe.profile.trace import DATA_RANGE, Op, Trace

MOST_TOP, MOST_MATMULS = 15, 12
_ATTENTION_OP = "scaled_dot_product_"
_COLLECTIVES = ("gloo:", "nccl:")


@dataclass(frozen=True)
class ClassRow:
    """One operator class in a step."""

    kind: str
    seconds: float
    share: float
    """Share of the time of all operators or kernels."""
    calls: float
    flops: float | None
    """None where the shapes of its operators do not say."""
    num_bytes: float

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity: FLOPs per byte."""
        return self.flops / self.num_bytes if self.flops is not None and self.num_bytes else None


@dataclass(frozen=True)
class TopRow:
    """One kernel or operator by name."""

    name: str
    kind: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Recorded:
    """What was measured beside the trace."""

    step_seconds: float | None = None
    """A step without the profiler; None where none was timed."""
    data_seconds: float | None = None
    """Wait for a batch in a step without the profiler."""
    known: Known = field(default_factory=Known)
    is_hopper: bool = True


@dataclass(frozen=True)
class RankProfile:
    """The step of one rank; all figures are means over the recorded steps."""

    is_cuda: bool
    num_steps: int
    step_seconds: float
    """A step without the profiler where one was timed, otherwise with it."""
    profiled_seconds: float
    """A step with the profiler."""
    classes: list[ClassRow]
    top: list[TopRow]
    matmuls: list[MatmulRow]
    missed: list[Missed]
    tensor_core_share: float
    """Share of the kernels' time in matmuls and attention on tensor cores; 0 on a CPU."""
    breakdown: dict[str, float]
    """Seconds of a step: forward, backward, update, exposed communication, data wait, gaps."""
    communication_seconds: float
    exposed_seconds: float
    """Communication during which nothing else runs."""
    gap_seconds: float
    """Time in which no kernel, or no operator, runs, without the wait for data."""
    data_seconds: float
    memory: MemoryTimeline | None

    @property
    def busy_seconds(self) -> float:
        """Time of all kernels or operators."""
        return sum(row.seconds for row in self.classes)

    @property
    def compute_seconds(self) -> float:
        """Time of all kernels or operators other than communication."""
        return sum(row.seconds for row in self.classes if row.kind != COMMUNICATION)

    def share_of(self, *kinds: str) -> float:
        """Share of the step in these classes."""
        return sum(row.seconds for row in self.classes if row.kind in kinds) / self.step_seconds


def rank_profile(trace: Trace, recorded: Recorded) -> RankProfile:
    """The profile of a trace with at least one step."""
    steps, pieces = trace.steps, pieces_of(trace)
    num_steps = len(steps)
    window = steps[0].start, max(steps[-1].end, max((piece.end for piece in pieces), default=0.0))
    profiled = (window[1] - window[0]) / num_steps
    rows = matmul_rows(pieces, num_steps=num_steps, is_cuda=trace.is_cuda)
    compute, communication = _busy(trace, pieces, window)
    exposed = length(without(communication, union(compute))) / num_steps
    phases = _by_phase(pieces, num_steps)
    busy = sum(phases.values()) + exposed
    # On a CPU the profiler lengthens the operators too, so the profiled step is the one that they add up to.
    timed = recorded.step_seconds if trace.is_cuda else None
    step = profiled if timed is None else max(timed, busy)
    data = min(_data_seconds(trace, recorded, num_steps), max(0.0, step - busy))
    gaps = max(0.0, step - busy - data)
    return RankProfile(
        is_cuda=trace.is_cuda,
        num_steps=num_steps,
        step_seconds=step,
        profiled_seconds=profiled,
        classes=_classes(pieces, num_steps),
        top=_top(pieces, num_steps),
        matmuls=rows[:MOST_MATMULS],
        missed=missed_matmuls(rows, is_hopper=recorded.is_hopper) if trace.is_cuda else [],
        tensor_core_share=_tensor_core_share(pieces) if trace.is_cuda else 0.0,
        breakdown={**phases, "exposed communication": exposed, "data wait": data, "gaps": gaps},
        communication_seconds=length(communication) / num_steps,
        exposed_seconds=exposed,
        gap_seconds=gaps,
        data_seconds=data,
        memory=memory_timeline(trace, recorded.known),
    )


def _busy(trace: Trace, pieces: list[Piece], window: Interval) -> tuple[list[Interval], list[Interval]]:
    """When something computes, and when something is communicated."""
    compute = [(piece.start, piece.end) for piece in pieces if piece.kind != COMMUNICATION]
    communication = [(piece.start, piece.end) for piece in pieces if piece.kind == COMMUNICATION]
    if not trace.is_cuda:
        compute = [(piece.start, piece.end) for piece in pieces if piece.kind not in (COMMUNICATION, OTHER)]
        communication += [(one.start, one.end) for one in trace.ranges if one.name.startswith(_COLLECTIVES)]
    return compute, within(communication, *window)


def _by_phase(pieces: list[Piece], num_steps: int) -> dict[str, float]:
    """Seconds in which something other than communication runs, by the phase that launched it."""
    found = dict.fromkeys(PHASES, 0.0)
    last_end = 0.0
    for piece in sorted(pieces, key=lambda one: one.start):
        if piece.kind != COMMUNICATION:
            found[piece.phase] += max(0.0, piece.end - max(piece.start, last_end)) / num_steps
            last_end = max(last_end, piece.end)
    del found["data"]  # it is reported as the wait for a batch
    return {str(phase): seconds for phase, seconds in found.items()}


def _data_seconds(trace: Trace, recorded: Recorded, num_steps: int) -> float:
    if recorded.data_seconds is not None and trace.is_cuda:
        return recorded.data_seconds
    return sum(one.end - one.start for one in trace.named(DATA_RANGE)) / num_steps


def _classes(pieces: list[Piece], num_steps: int) -> list[ClassRow]:
    seconds, calls = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0)
    for piece in pieces:
        seconds[piece.kind] += piece.seconds / num_steps
        calls[piece.kind] += 1
    flops: dict[str, float | None] = {}
    num_bytes = dict.fromkeys(CLASSES, 0.0)
    for op, kind in _counted(pieces):
        work, before = work_of(op, kind), flops.get(kind, 0.0)
        flops[kind] = None if work.flops is None or before is None else before + work.flops / num_steps
        num_bytes[kind] += work.num_bytes / num_steps
    total = sum(seconds.values()) or 1.0
    rows = [
        ClassRow(
            kind,
            seconds[kind],
            seconds[kind] / total,
            calls[kind] / num_steps,
            flops.get(kind),
            num_bytes[kind],
        )
        for kind in CLASSES
        if calls[kind]
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def _counted(pieces: Sequence[Piece]) -> Iterable[tuple[Op, str]]:
    """Every operator whose work counts, once, with its class.

    Attention counts as the operator that has its shapes; anything else as the innermost.
    """
    inner = {id(piece.op.parent) for piece in pieces if piece.op is not None and _is_work(piece)}
    seen: set[int] = set()
    for piece in pieces:
        op = piece.op
        if op is None or not _is_work(piece):
            continue
        if piece.kind == ATTENTION:
            found = _attention_op(op)
            if found is None:
                continue
            op = found
        elif id(op) in inner and (piece.kind != MATMUL or matmul_shape(op) is None):
            continue
        if id(op) not in seen:
            seen.add(id(op))
            yield op, piece.kind


def _attention_op(op: Op) -> Op | None:
    """The operator whose shapes say the work of attention; None for wrappers around it."""
    outermost = op
    at: Op | None = op
    while at is not None and class_of_op(at.name) == ATTENTION:
        if _ATTENTION_OP in at.name and not at.name.endswith("scaled_dot_product_attention"):
            return at
        outermost, at = at, at.parent
    return outermost if op.inner_seconds == 0.0 and outermost is op else None


def _is_work(piece: Piece) -> bool:
    return piece.kind not in (OTHER, COMMUNICATION)


def _top(pieces: Iterable[Piece], num_steps: int) -> list[TopRow]:
    found: dict[str, tuple[str, float, int]] = {}
    for piece in pieces:
        _, seconds, calls = found.get(piece.name, (piece.kind, 0.0, 0))
        found[piece.name] = piece.kind, seconds + piece.seconds, calls + 1
    rows = [
        TopRow(name, kind, seconds / num_steps, calls / num_steps)
        for name, (kind, seconds, calls) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:MOST_TOP]


def _tensor_core_share(pieces: Iterable[Piece]) -> float:
    computed = [piece for piece in pieces if piece.kind not in (COMMUNICATION, COPY)]
    total = sum(piece.seconds for piece in computed)
    kinds = (MATMUL, ATTENTION)
    on_cores = sum(
        piece.seconds for piece in computed if piece.kind in kinds and uses_tensor_cores(piece.name)
    )
    return on_cores / total if total else 0.0
