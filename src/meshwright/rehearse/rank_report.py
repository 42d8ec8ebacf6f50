"""What one rank of a run needs, sends and computes in a step: the trace in figures."""

import dataclasses
import textwrap
from typing import Any

from meshwright.errors import SpecError
from meshwright.rehearse.allocator import Request, replay
from meshwright.rehearse.categories import step_peak
from meshwright.rehearse.extrapolate import (
    Cut,
    Shortening,
    extended,
    shortened,
    shortening_of,
    without_layers,
)
from meshwright.rehearse.trace import Trace, trace_rank
from meshwright.rehearse.world import mesh_coordinates, require_rank
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.stages import stage_layers, stages_of_rank

# cuBLAS and cuBLASLt ask torch for 32 MiB each on Hopper: what six measured runs had beyond their tensors.
WORKSPACE_BYTES = 64 * 2**20

# Five compiled runs on an H200 were traced so: they held up to 15.8% more than measured.
AS_IF_UNCOMPILED = "traced as if uncompiled, which reads up to 16% high"


@dataclasses.dataclass(frozen=True)
class Collective:
    """All calls of one kind over one axis in a step."""

    axis: str
    kind: str
    count: int
    num_bytes: int
    """Of the larger side of each call: what is gathered, scattered or reduced."""


@dataclasses.dataclass(frozen=True)
class RankReport:
    """One rank of a world; bytes as torch counts them, at the fullest phase of a step."""

    rank: int
    coordinates: dict[str, int]
    items: dict[str, float]
    peak_phase: str
    reserved_bytes: float
    """With expandable segments."""
    reserved_default_bytes: float
    """With segments of fixed sizes, torch's default."""
    collectives: list[Collective]
    flops: float
    num_traces: int
    """1: the whole step was traced; more: it was put together from shorter ones."""
    seconds: float
    host_bytes: float = 0.0
    """Pinned host memory that `memory.offload` needs."""
    form: str = "uncompiled"
    """Of the blocks that were traced: compiled, uncompiled, or as if uncompiled and why."""

    @property
    def allocated_bytes(self) -> float:
        """Peak of what tensors need."""
        return sum(self.items.values())


def ranks_to_rehearse(parallel: ParallelSpec) -> list[int]:
    """The first rank of the first, a middle and the last pipeline stage."""
    per_stage = parallel.num_ranks // parallel.pp
    stages = sorted({0, parallel.pp // 2, parallel.pp - 1})
    return [stage * per_stage for stage in stages]


@dataclasses.dataclass(frozen=True)
class Task:
    """One trace that the report of a rank needs."""

    run: RunSpec
    rank: int
    cut: Cut
    num_steps: int
    imbalance: float

    @property
    def work(self) -> int:
        """Blocks times micro-batches that are traced: what its seconds go with."""
        stages = stages_of_rank(self.run.parallel, mesh_coordinates(self.rank, self.run.parallel)["pp"])
        layers = stage_layers(self.run.model, self.run.parallel.num_stages)
        num_blocks = sum(max(1, len(layers[index]) - self.cut.layers) for index in stages)
        return num_blocks * (self.run.accumulation - self.cut.microbatches) * self.num_steps


Traced = dict[Cut, tuple[Trace, str]]


def trace_tasks(
    run: RunSpec, rank: int, *, num_steps: int = 2, imbalance: float = 1.0, is_full: bool = False
) -> list[Task]:
    """The traces of a rank; the parts of a long step that repeat are traced once unless `is_full`."""
    require_rank(run.parallel, rank)
    shortening = _shortening(run, rank, is_full=is_full)
    cuts = dict.fromkeys([shortening.deep(), *(cut for cut, _ in shortening.cuts())])
    # Shortened, the first step is like all others, which a test holds; a second one would cost as much.
    count = num_steps if len(cuts) == 1 else 1
    return [Task(run, rank, cut, count, imbalance) for cut in cuts]


def _shortening(run: RunSpec, rank: int, *, is_full: bool) -> Shortening:
    found = shortening_of(run, mesh_coordinates(rank, run.parallel)["pp"])
    return Shortening() if is_full or len(found.cuts()) == 1 else found


def run_task(task: Task) -> tuple[Trace, str]:
    """The trace, and what it is one of."""
    with without_layers(task.cut.layers):
        run = shortened(task.run, task.cut)
        return _traced(run, task.rank, num_steps=task.num_steps, imbalance=task.imbalance)


def rehearse_rank(
    run: RunSpec, rank: int, *, num_steps: int = 2, imbalance: float = 1.0, is_full: bool = False
) -> RankReport:
    """Trace a rank, here and one trace after the other."""
    tasks = trace_tasks(run, rank, num_steps=num_steps, imbalance=imbalance, is_full=is_full)
    return report_of(run, rank, {task.cut: run_task(task) for task in tasks}, is_full=is_full)


def report_of(run: RunSpec, rank: int, traced: Traced, *, is_full: bool = False) -> RankReport:
    """The figures of a rank from all its traces."""
    shortening = _shortening(run, rank, is_full=is_full)
    weighted = [(traced[cut][0], weight) for cut, weight in shortening.cuts()]
    deep, form = traced[shortening.deep()]
    return _report(rank, mesh_coordinates(rank, run.parallel), weighted, shortening, deep, form)


def _traced(run: RunSpec, rank: int, **how: Any) -> tuple[Trace, str]:
    """A trace and what it is one of: a run that cannot be compiled here is traced as if it were not to be."""
    if not run.compile:
        return trace_rank(run, rank, **how), "uncompiled"
    try:
        trace = trace_rank(run, rank, **how)
    except SpecError as error:
        plain = trace_rank(run.with_(compile=False), rank, **how)
        return plain, f"{AS_IF_UNCOMPILED}: {textwrap.shorten(error.fact, 160, placeholder=' ...')}"
    if trace.num_graphs == 0:
        return trace, "uncompiled, as torch's compiler passed over every block; else it reads up to 16% high"
    return trace, "compiled"


def _report(
    rank: int,
    coordinates: dict[str, int],
    traces: list[tuple[Trace, float]],
    shortening: Shortening,
    deep: Trace,
    form: str,
) -> RankReport:
    whole = extended(traces, shortening)
    seconds = {id(trace): trace.seconds for trace in (deep, *(one for one, _ in traces))}
    return RankReport(
        rank=rank,
        coordinates=coordinates,
        items={**whole.items, "workspace": float(WORKSPACE_BYTES)},
        peak_phase=str(whole.phase),
        reserved_bytes=_reserved(deep, whole.allocated_bytes, is_expandable=True),
        reserved_default_bytes=_reserved(deep, whole.allocated_bytes, is_expandable=False),
        collectives=[
            Collective(axis, kind, round(count), round(num_bytes))
            for (axis, kind), (count, num_bytes) in sorted(whole.traffic.items())
        ],
        flops=whole.flops,
        num_traces=len(seconds),
        seconds=sum(seconds.values()),
        host_bytes=whole.host_bytes,
        form=form,
    )


def _reserved(deep: Trace, allocated: float, *, is_expandable: bool) -> float:
    """What the allocator holds: holes do not grow with micro-batches, nor evenly with layers."""
    requests = (Request(event.number, event.num_bytes, event.stream) for event in deep.events)
    held = replay(requests, is_expandable=is_expandable).reserved_bytes
    return allocated + held - step_peak(deep).allocated_bytes + WORKSPACE_BYTES
