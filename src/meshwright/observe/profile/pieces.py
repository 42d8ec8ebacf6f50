"""The work of a trace in one form: kernels on a device, or operators on a CPU, with class and phase."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.observe.profile.intervals import Cover
from meshwright.observe.profile.kernel_classes import (
    ATTENTION,
    COMMUNICATION,
    ELEMENTWISE,
    MATMUL,
    NORM,
    OPTIMIZER,
    OTHER,
    class_of,
    class_of_op,
)
from meshwright.observe.profile.trace import BACKWARD_OP, UPDATE_RANGE, Op, Range, Trace

Phase = Literal["forward", "backward", "update", "data"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update", "data")
_COVERING = (ATTENTION, NORM)


@dataclass(slots=True)
class Piece:
    """One kernel, or one operator of a CPU without the operators that it calls."""

    name: str
    kind: str
    phase: Phase
    start: float
    end: float
    seconds: float
    """Time of its own."""
    op: Op | None
    lane: object = 0
    """Stream or thread."""


class Phases:
    """The phase of a step at any instant of the host."""

    def __init__(self, trace: Trace) -> None:
        self.backward = Cover((op.start, op.end) for op in trace.ops if op.name.startswith(BACKWARD_OP))
        self.update = Cover((one.start, one.end) for one in trace.named(UPDATE_RANGE))
        steps = sorted((one.start, one.end) for one in trace.named("meshwright: step"))
        self._steps = Cover(steps)
        last_backward = sorted(op.end for op in trace.ops if op.name.startswith(BACKWARD_OP))
        self._after = Cover(_tails(steps, last_backward))

    def at(self, instant: float) -> Phase:
        """The phase at an instant; what follows the last backward of a step is the update."""
        if instant not in self._steps:
            return "data"
        if instant in self.backward:
            return "backward"
        return "update" if instant in self.update or instant in self._after else "forward"


def _tails(steps: list[tuple[float, float]], ends: list[float]) -> Iterator[tuple[float, float]]:
    """The rest of each step after its last backward operator."""
    for start, end in steps:
        inside = [one for one in ends if start <= one <= end]
        if inside:
            yield max(inside), end


def pieces_of(trace: Trace) -> list[Piece]:
    """All work of the recorded steps, in order of its start."""
    phases = Phases(trace)
    return list(_kernels(trace, phases) if trace.is_cuda else _operators(trace, phases))


def _kernels(trace: Trace, phases: Phases) -> Iterator[Piece]:
    for kernel in trace.kernels:
        phase = phases.at(kernel.start if kernel.launched_at is None else kernel.launched_at)
        kind = _kernel_class(kernel.name, kernel.op, phase, phases, kernel.launched_at)
        seconds = kernel.end - kernel.start
        yield Piece(kernel.name, kind, phase, kernel.start, kernel.end, seconds, kernel.op, kernel.stream)


def _kernel_class(name: str, op: Op | None, phase: Phase, phases: Phases, at: float | None) -> str:
    kind = class_of(name)
    if kind in (COMMUNICATION, MATMUL, ATTENTION):
        return kind
    if phase == "update" and at is not None and at in phases.update:
        return OPTIMIZER
    covering = _covering_class(op)
    if covering is not None:
        return covering
    by_op = OTHER if op is None else class_of_op(op.name)
    return by_op if kind in (OTHER, ELEMENTWISE) and by_op == NORM else kind


def _covering_class(op: Op | None) -> str | None:
    """attention or normalisation, where the operator is a part of one."""
    while op is not None:
        kind = class_of_op(op.name)
        if kind in _COVERING:
            return kind
        op = op.parent
    return None


def _operators(trace: Trace, phases: Phases) -> Iterator[Piece]:
    steps = trace.steps
    thread = steps[0].thread if steps else None
    for op in trace.ops:
        if op.thread != thread or not _is_inside(op, steps):
            continue
        phase = phases.at(op.start)
        kind = class_of_op(op.name)
        if kind not in (COMMUNICATION, MATMUL):
            covering = _covering_class(op)
            in_optimizer = op.start in phases.update
            kind = OPTIMIZER if in_optimizer else kind if covering is None else covering
        yield Piece(op.name, kind, phase, op.start, op.end, op.own_seconds, op, op.thread)


def _is_inside(op: Op, steps: list[Range]) -> bool:
    return any(step.start <= op.start and op.end <= step.end for step in steps)
