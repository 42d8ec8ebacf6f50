"""The report of one rank: peak bytes by item, collectives and FLOPs of a step, from its traces."""

import dataclasses
import textwrap
from typing import Any

from meshwright.errors import SpecError
from meshwright.plan.memory.rank_bytes import WORKSPACE_BYTES
from meshwright.rehearse.allocator import Request, replay
from meshwright.rehearse.categories import step_peak
from meshwright.rehearse.extrapolate import (
    Shortening,
    StepFigures,
    Truncation,
    extrapolated,
    shortening_of,
    truncated,
)
from meshwright.rehearse.trace import Trace, trace_rank
from meshwright.rehearse.world import require_rank
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.parallel import mesh_coordinates
from meshwright.spec.stages import stage_layers, stages_of_rank

# Uncompiled traces of five compiled runs on an H200 were up to 15.8% above the measured bytes.
TRACED_UNCOMPILED = "traced as if uncompiled, which reads up to 16% high"


@dataclasses.dataclass(frozen=True)
class Collective:
    """All calls of one kind of collective over one axis in a step."""

    axis: str
    kind: str
    count: int
    num_bytes: int
    """Sum over the calls of the larger of input and output: what is gathered, scattered or reduced."""


@dataclasses.dataclass(frozen=True)
class RankReport:
    """The step of one rank; bytes are counted as torch counts them."""

    rank: int
    coordinates: dict[str, int]
    """The rank's coordinate on each mesh axis."""
    items: dict[str, float]
    """Bytes by item at the peak of the step."""
    peak_phase: str
    """The phase of the step that the peak falls into."""
    reserved_bytes: float
    """Bytes that the caching allocator reserves with expandable segments."""
    reserved_default_bytes: float
    """Bytes that it reserves with segments of fixed sizes, torch's default."""
    collectives: list[Collective]
    flops: float
    num_traces: int
    """1 where the full step was traced; more where it was extrapolated from truncated traces."""
    seconds: float
    """Wall time of the traces."""
    host_bytes: float = 0.0
    """Bytes of pinned host memory that `memory.offload` needs."""
    form: str = "uncompiled"
    """How the blocks were traced: compiled, uncompiled, or as if uncompiled with the reason."""

    @property
    def allocated_bytes(self) -> float:
        """Bytes of all items at the peak."""
        return sum(self.items.values())


def ranks_to_rehearse(parallel: ParallelSpec) -> list[int]:
    """The first rank of the first, a middle and the last pipeline stage."""
    per_stage = parallel.num_ranks // parallel.pp
    stages = sorted({0, parallel.pp // 2, parallel.pp - 1})
    return [stage * per_stage for stage in stages]


@dataclasses.dataclass(frozen=True)
class TraceTask:
    """One trace that the report of a rank needs."""

    run: RunSpec
    rank: int
    truncation: Truncation
    num_steps: int
    imbalance: float

    @property
    def work(self) -> int:
        """Blocks times micro-batches times steps: the time of a trace is proportional to it."""
        stages = stages_of_rank(self.run.parallel, mesh_coordinates(self.run.parallel, self.rank)["pp"])
        layers = stage_layers(self.run.model, self.run.parallel.num_stages)
        num_blocks = sum(max(1, len(layers[index]) - self.truncation.layers) for index in stages)
        return num_blocks * (self.run.accumulation - self.truncation.microbatches) * self.num_steps


Traced = dict[Truncation, tuple[Trace, str]]
"""The traces of one rank, each with the form of its blocks."""


def trace_tasks(
    run: RunSpec, rank: int, *, num_steps: int = 2, imbalance: float = 1.0, extrapolate: bool = True
) -> list[TraceTask]:
    """The traces of a rank: truncated ones where the step is long, unless `extrapolate` is False."""
    require_rank(run.parallel, rank)
    shortening = _shortening(run, rank, extrapolate=extrapolate)
    truncations = dict.fromkeys([shortening.deep(), *(one for one, _ in shortening.truncations())])
    # The first step of a truncated trace is like a later one, as a test asserts; a second would cost as much.
    count = num_steps if len(truncations) == 1 else 1
    return [TraceTask(run, rank, truncation, count, imbalance) for truncation in truncations]


def peak_tasks(run: RunSpec, rank: int) -> list[TraceTask]:
    """The traces that the peak of a rank needs: one step, and none for fragmentation."""
    require_rank(run.parallel, rank)
    shortening = _shortening(run, rank, extrapolate=True)
    return [TraceTask(run, rank, truncation, 1, 1.0) for truncation, _ in shortening.truncations()]


def allocated_of(run: RunSpec, rank: int, traced: Traced) -> StepFigures:
    """The figures of a rank from the traces of `peak_tasks`, with the workspace."""
    shortening = _shortening(run, rank, extrapolate=True)
    weighted = [(traced[truncation][0], weight) for truncation, weight in shortening.truncations()]
    found = extrapolated(weighted, shortening)
    return dataclasses.replace(found, allocated_bytes=found.allocated_bytes + WORKSPACE_BYTES)


def _shortening(run: RunSpec, rank: int, *, extrapolate: bool) -> Shortening:
    found = shortening_of(run, mesh_coordinates(run.parallel, rank)["pp"])
    return found if extrapolate and len(found.truncations()) > 1 else Shortening()


def run_task(task: TraceTask) -> tuple[Trace, str]:
    """The trace, and the form of its blocks."""
    return _traced(
        truncated(task.run, task.truncation),
        task.rank,
        num_steps=task.num_steps,
        imbalance=task.imbalance,
        left_out_layers=task.truncation.layers,
    )


def rehearse_rank(
    run: RunSpec, rank: int, *, num_steps: int = 2, imbalance: float = 1.0, extrapolate: bool = True
) -> RankReport:
    """Trace a rank in this process, one trace after the other."""
    tasks = trace_tasks(run, rank, num_steps=num_steps, imbalance=imbalance, extrapolate=extrapolate)
    return report_of(run, rank, {task.truncation: run_task(task) for task in tasks}, extrapolate=extrapolate)


def report_of(run: RunSpec, rank: int, traced: Traced, *, extrapolate: bool = True) -> RankReport:
    """The report of a rank from all its traces."""
    shortening = _shortening(run, rank, extrapolate=extrapolate)
    weighted = [(traced[truncation][0], weight) for truncation, weight in shortening.truncations()]
    deep, form = traced[shortening.deep()]
    return _report(rank, mesh_coordinates(run.parallel, rank), weighted, shortening, deep, form)


def _traced(run: RunSpec, rank: int, **how: Any) -> tuple[Trace, str]:
    """A trace and the form of its blocks; a run that cannot be compiled here is traced uncompiled."""
    if not run.compile:
        return trace_rank(run, rank, **how), "uncompiled"
    try:
        trace = trace_rank(run, rank, **how)
    except SpecError as error:
        plain = trace_rank(run.with_(compile=False), rank, **how)
        return plain, f"{TRACED_UNCOMPILED}: {textwrap.shorten(error.fact, 160, placeholder=' ...')}"
    if trace.num_graphs == 0:
        if "activations" in run.memory.offload:  # selective recompute would keep on the device what moves
            trace = trace_rank(run.with_(compile=False), rank, **how)
        return trace, "uncompiled, as torch's compiler skipped every block; otherwise it reads up to 16% high"
    return trace, "compiled"


def _report(
    rank: int,
    coordinates: dict[str, int],
    traces: list[tuple[Trace, float]],
    shortening: Shortening,
    deep: Trace,
    form: str,
) -> RankReport:
    full = extrapolated(traces, shortening)
    seconds = {id(trace): trace.seconds for trace in (deep, *(one for one, _ in traces))}
    return RankReport(
        rank=rank,
        coordinates=coordinates,
        items={**full.items, "workspace": float(WORKSPACE_BYTES)},
        peak_phase=str(full.phase),
        reserved_bytes=_reserved(deep, full.allocated_bytes, is_expandable=True),
        reserved_default_bytes=_reserved(deep, full.allocated_bytes, is_expandable=False),
        collectives=[
            Collective(axis, kind, round(count), round(num_bytes))
            for (axis, kind), (count, num_bytes) in sorted(full.traffic.items())
        ],
        flops=full.flops,
        num_traces=len(seconds),
        seconds=sum(seconds.values()),
        host_bytes=full.host_bytes,
        form=form,
    )


def _reserved(deep: Trace, allocated: float, *, is_expandable: bool) -> float:
    """Reserved bytes: fragmentation does not grow with micro-batches, and not linearly with layers."""
    requests = (Request(event.number, event.num_bytes, event.stream) for event in deep.events)
    reserved = replay(requests, is_expandable=is_expandable).reserved_bytes
    return allocated + reserved - step_peak(deep).allocated_bytes + WORKSPACE_BYTES
