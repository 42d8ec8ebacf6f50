"""The measured actions of a pipeline over those that its schedule predicts.

The prediction is the simulation of the schedule with the measured time of every stage and messages that take
no time: what is longer than it was spent on messages, on waiting for a slow rank, or between actions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np

from meshwright.observe.profile.kernel_classes import COMMUNICATION, class_of
from meshwright.observe.profile.trace import Range, Trace
from meshwright.plan.time.timeline import StageSeconds, TimedAction, Timeline, simulate
from meshwright.plan.workload.schedules import Action, Kind, PipelineShape
from meshwright.spec.parallel import ParallelSpec, Schedule

TIMELINE_FILE = "timeline.json"
_PREFIX = "pipeline"


def action_name(kind: str, stage: int, microbatch: int) -> str:
    """The name of the profiler's range around one action."""
    return f"{_PREFIX} {kind} stage {stage} micro-batch {microbatch}"


@dataclass(frozen=True)
class RankActions:
    """The actions of one rank in the last recorded step; times are Unix seconds."""

    rank: int
    pp_rank: int
    actions: tuple[TimedAction, ...]


def measured_actions(trace: Trace, *, rank: int, pp_rank: int) -> RankActions | None:
    """The actions of the last recorded step; None without a pipeline."""
    steps = trace.steps
    named = [one for one in trace.named(_PREFIX) if steps and steps[-1].start <= one.start <= steps[-1].end]
    if not named:
        return None
    timed = [_timed(one, trace) for one in sorted(named, key=lambda one: one.start)]
    return RankActions(rank, pp_rank, tuple(one for one in timed if one is not None))


def _timed(found: Range, trace: Trace) -> TimedAction | None:
    _, kind, _, stage, _, microbatch = found.name.split()
    start, end = _on_device(found, trace) if trace.is_cuda else (found.start, found.end)
    if end <= start:
        return None
    action = Action(cast(Kind, kind), int(stage), int(microbatch))
    return TimedAction(action, trace.origin + start, trace.origin + end)


def _on_device(found: Range, trace: Trace) -> tuple[float, float]:
    """From the first to the last kernel that was launched in the range, without communication."""
    kernels = [
        one
        for one in trace.kernels
        if one.launched_at is not None
        and found.start <= one.launched_at <= found.end
        and class_of(one.name) != COMMUNICATION
    ]
    if not kernels:
        return found.start, found.start
    return min(one.start for one in kernels), max(one.end for one in kernels)


def timeline_document(
    ranks: Iterable[RankActions], parallel: ParallelSpec, num_microbatches: int
) -> dict[str, Any] | None:
    """`timeline.json`: measured and predicted actions of one rank of each pipeline position, from time 0."""
    first: dict[int, RankActions] = {}
    for one in sorted(ranks, key=lambda each: each.rank):
        first.setdefault(one.pp_rank, one)
    if len(first) < parallel.pp or not all(one.actions for one in first.values()):
        return None
    ordered = [first[pp_rank] for pp_rank in sorted(first)]
    origin = min(one.actions[0].start for one in ordered)
    shape = PipelineShape(parallel.pp, parallel.virtual_stages, num_microbatches)
    predicted = simulate(parallel.schedule, shape, _stage_seconds(ordered, shape.num_stages))
    finish = max(timed.end for one in ordered for timed in one.actions) - origin
    return {
        "version": 1,
        "schedule": parallel.schedule,
        "pp": parallel.pp,
        "virtual_stages": parallel.virtual_stages,
        "num_microbatches": num_microbatches,
        "measured_seconds": finish,
        "predicted_seconds": predicted.finish_seconds,
        "ranks": [
            {
                "rank": one.rank,
                "pp_rank": one.pp_rank,
                "measured": [_row(timed, origin) for timed in one.actions],
                "predicted": [_row(timed, 0.0) for timed in predicted.ranks[one.pp_rank]],
            }
            for one in ordered
        ],
    }


def _row(timed: TimedAction, origin: float) -> list[Any]:
    """[kind, stage, micro-batch, start, end]"""
    return [*timed.action, round(timed.start - origin, 7), round(timed.end - origin, 7)]


def _stage_seconds(ranks: Sequence[RankActions], num_stages: int) -> StageSeconds:
    """Median time of each kind of action in each stage; a full backward counts as input and weight half."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in ranks:
        for timed in one.actions:
            key = timed.action.kind, timed.action.stage
            found.setdefault(key, []).append(timed.end - timed.start)
    medians = {key: median(values) for key, values in found.items()}
    forward = np.array([medians.get(("F", stage), 0.0) for stage in range(num_stages)])
    full = np.array([medians.get(("B", stage), 0.0) for stage in range(num_stages)])
    inputs = np.array([medians.get(("I", stage), 0.0) for stage in range(num_stages)])
    weights = np.array([medians.get(("W", stage), 0.0) for stage in range(num_stages)])
    return StageSeconds(
        forward, np.where(inputs > 0, inputs, full / 2), np.where(weights > 0, weights, full / 2)
    )


def timelines(document: Mapping[str, Any]) -> tuple[Timeline, Timeline]:
    """The measured and the predicted timeline of a document."""
    return (
        Timeline(tuple(_actions(rank["measured"]) for rank in document["ranks"])),
        Timeline(tuple(_actions(rank["predicted"]) for rank in document["ranks"])),
    )


def _actions(rows: Iterable[Sequence[Any]]) -> tuple[TimedAction, ...]:
    return tuple(
        TimedAction(Action(row[0], int(row[1]), int(row[2])), float(row[3]), float(row[4])) for row in rows
    )


def shape_of(document: Mapping[str, Any]) -> tuple[Schedule, PipelineShape]:
    """The schedule of a document and its shape."""
    shape = PipelineShape(document["pp"], document["virtual_stages"], document["num_microbatches"])
    return document["schedule"], shape
