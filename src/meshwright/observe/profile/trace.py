"""A Chrome trace of torch's profiler as plain values. Nothing here imports torch.

Times are seconds since an instant that all events of a trace share.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MICROSECOND = 1e-6
DATA_RANGE, STEP_RANGE = "meshwright: data", "meshwright: step"
"""Names of the ranges around the fetch of a batch and around a training step."""
UPDATE_RANGE, BACKWARD_OP = "Optimizer.", "autograd::engine::evaluate_function"
"""How torch's own events of the optimizer and of the backward pass begin."""
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_COLLECTIVES = ("gloo:", "nccl:", "c10d::")
_CUDA_MEMORY = 1


@dataclass(slots=True)
class Op:
    """One operator on the host, such as `aten::mm`."""

    name: str
    start: float
    end: float
    thread: Any = 0
    dims: Sequence[Sequence[int]] = ()
    strides: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[str] = ()
    """Arguments that are no tensors, as text."""
    parent: "Op | None" = None
    inner_seconds: float = 0.0
    """Time in the operators that this one calls."""

    @property
    def own_seconds(self) -> float:
        """Time in this operator itself."""
        return max(0.0, self.end - self.start - self.inner_seconds)


@dataclass(slots=True)
class Kernel:
    """One kernel or copy on the device."""

    name: str
    start: float
    end: float
    stream: Any = 0
    op: Op | None = None
    """The innermost operator that launched it, where the trace links them."""
    launched_at: float | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A named range on the host: a step, the optimizer, a pipeline action."""

    name: str
    start: float
    end: float
    thread: Any = 0


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An allocation, or with negative bytes a free."""

    at: float
    num_bytes: int
    address: int
    total_bytes: int
    """Allocated in all after it, as the profiler counts."""


@dataclass
class Trace:
    """The events of the steps that a rank recorded."""

    ops: list[Op] = field(default_factory=list[Op])
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    ranges: list[Range] = field(default_factory=list[Range])
    memory: list[MemoryEvent] = field(default_factory=list[MemoryEvent])
    origin: float = 0.0
    """Unix time of the instant that times are relative to."""

    @property
    def is_cuda(self) -> bool:
        """Whether kernels of a device were recorded."""
        return bool(self.kernels)

    @property
    def steps(self) -> list[Range]:
        """The recorded steps, each with the fetch of its batch."""
        data = sorted(self.named(DATA_RANGE), key=lambda one: one.start)
        steps = sorted(self.named(STEP_RANGE), key=lambda one: one.start)
        starts = [one.start for one in data]
        return [Range(one.name, _last_before(starts, one.start), one.end, one.thread) for one in steps]

    def named(self, beginning: str) -> list[Range]:
        """The ranges whose name begins so."""
        return [one for one in self.ranges if one.name.startswith(beginning)]


def _last_before(starts: list[float], at: float) -> float:
    index = bisect_right(starts, at)
    return starts[index - 1] if index else at


def read_trace(document: Mapping[str, Any]) -> Trace:
    """The trace in a document that `export_chrome_trace` wrote."""
    events: Iterable[Mapping[str, Any]] = document.get("traceEvents", ())
    trace = Trace(origin=float(document.get("baseTimeNanoseconds", 0)) * 1e-9)
    by_id: dict[int, Op] = {}
    launches: dict[int, float] = {}
    device: list[Mapping[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "cpu_op":
            _add_op(trace, event, by_id)
        elif category in _DEVICE_CATEGORIES:
            device.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[event.get("args", {}).get("correlation", -1)] = event["ts"] * MICROSECOND
        elif category == "user_annotation":
            trace.ranges.append(Range(event["name"], *_span(event), event.get("tid", 0)))
        elif event.get("name") == "[memory]":
            _add_memory(trace, event)
    trace.kernels = sorted((_kernel(one, by_id, launches) for one in device), key=lambda one: one.start)
    _keep_one_device(trace, events)
    link_parents(trace.ops)
    return trace


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"]) * MICROSECOND
    return start, start + float(event.get("dur", 0.0)) * MICROSECOND


def _add_op(trace: Trace, event: Mapping[str, Any], by_id: dict[int, Op]) -> None:
    arguments: Mapping[str, Any] = event.get("args", {})
    start, end = _span(event)
    if event["name"].startswith(_HOST_COLLECTIVES):
        trace.ranges.append(Range(event["name"], start, end, event.get("tid", 0)))
    op = Op(
        event["name"],
        start,
        end,
        event.get("tid", 0),
        dims=arguments.get("Input Dims", ()),
        strides=arguments.get("Input Strides", ()),
        dtypes=arguments.get("Input type", ()),
        values=arguments.get("Concrete Inputs", ()),
    )
    trace.ops.append(op)
    if "External id" in arguments:
        by_id[arguments["External id"]] = op


def _kernel(event: Mapping[str, Any], by_id: Mapping[int, Op], launches: Mapping[int, float]) -> Kernel:
    arguments: Mapping[str, Any] = event.get("args", {})
    op = by_id.get(arguments.get("External id", -1))
    launched_at = launches.get(arguments.get("correlation", -1), None if op is None else op.start)
    return Kernel(event["name"], *_span(event), arguments.get("stream", 0), op, launched_at)


def _add_memory(trace: Trace, event: Mapping[str, Any]) -> None:
    arguments = event["args"]
    trace.memory.append(
        MemoryEvent(
            float(event["ts"]) * MICROSECOND,
            int(arguments["Bytes"]),
            int(arguments["Addr"]),
            int(arguments.get("Total Allocated", 0)),
        )
    )


def _keep_one_device(trace: Trace, events: Iterable[Mapping[str, Any]]) -> None:
    """Keep the memory events of the device that computes: CUDA where there are kernels, else the host."""
    kinds = [one["args"].get("Device Type") for one in events if one.get("name") == "[memory]"]
    if trace.is_cuda and _CUDA_MEMORY in kinds:
        pairs = zip(trace.memory, kinds, strict=True)
        trace.memory = [event for event, kind in pairs if kind == _CUDA_MEMORY]
    trace.memory.sort(key=lambda one: one.at)


def link_parents(ops: list[Op]) -> None:
    """Sort operators by start, and set the parent and the inner time of each."""
    ops.sort(key=lambda op: (op.start, -op.end))
    open_ops: dict[Any, list[Op]] = {}
    for op in ops:
        stack = open_ops.setdefault(op.thread, [])
        while stack and stack[-1].end <= op.start:
            stack.pop()
        if stack:
            op.parent = stack[-1]
            op.parent.inner_seconds += op.end - op.start
        stack.append(op)
