"""Simulation of a pipeline: when each action starts and ends, and the bubble.

A rank runs its actions in order. A forward waits for the stage before, a backward for the stage after, and
for a message of `hop` seconds where that stage is on another rank. Sends are asynchronous, so a message
delays only its receiver.

`simulate` is exact for any stage times. `finish_seconds` evaluates the same recursion for many stage times at
once. It simulates few micro-batches and extrapolates to thousands: a pipeline's steady state is periodic.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.workload.schedules import Action, PipelineShape, actions, stage_rank
from meshwright.spec.parallel import Schedule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in each stage, in model order; a full backward is input + weight.

    Each field is an array whose first dim is the stage; further dims are layouts priced together.
    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    hop: Floats | float = 0.0
    """Seconds from the end of an action until another rank has its result."""

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float,
        backward_input: float,
        backward_weight: float,
        hop: float = 0.0,
    ) -> "StageSeconds":
        """Stages that all take the same time."""
        equal = np.ones(num_stages)
        return cls(equal * forward, equal * backward_input, equal * backward_weight, hop)

    def by_kind(self) -> dict[str, Floats]:
        """Seconds of every kind of action, by stage."""
        full = self.backward_input + self.backward_weight
        return {"F": self.forward, "B": full, "I": self.backward_input, "W": self.backward_weight}


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timed actions of every pipeline rank."""

    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def finish_seconds(self) -> float:
        """End of the last action of any rank."""
        return max(rank[-1].end for rank in self.ranks)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(timed.end - timed.start for timed in rank) for rank in self.ranks)

    @property
    def bubble_overhead(self) -> float:
        """Idle over busy seconds of the busiest rank: (p-1)/m for 1f1b with equal stages."""
        busiest = max(self.busy_seconds)
        return (self.finish_seconds - busiest) / busiest

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the time of all ranks."""
        return 1.0 - sum(self.busy_seconds) / (len(self.ranks) * self.finish_seconds)


class _Step(NamedTuple):
    """An action, the position of its predecessor on its rank and of what it waits for; -1 is none."""

    action: Action
    rank: int
    previous: int
    needs: int
    is_hop: bool


@lru_cache(maxsize=512)
def _program(schedule: Schedule, shape: PipelineShape) -> tuple[_Step, ...]:
    """The actions of all ranks in topological order: everything an action waits for comes before it."""
    orders = actions(schedule, shape)
    program: list[_Step] = []
    done: dict[tuple[bool, int, int], int] = {}
    next_action, last_of_rank = [0] * shape.pp, [-1] * shape.pp
    rank, stalled = 0, 0
    while stalled < shape.pp:
        before = len(program)
        while next_action[rank] < len(orders[rank]):
            action = orders[rank][next_action[rank]]
            key = _needed(action, shape.num_stages)
            if key is not None and key not in done:
                break
            needs = -1 if key is None else done[key]
            is_hop = key is not None and stage_rank(schedule, key[1], shape.pp) != rank
            if action.kind != "W":
                done[action.kind == "F", action.stage, action.microbatch] = len(program)
            program.append(_Step(action, rank, last_of_rank[rank], needs, is_hop))
            last_of_rank[rank] = len(program) - 1
            next_action[rank] += 1
        stalled = 0 if len(program) > before else stalled + 1
        rank = (rank + 1) % shape.pp
    assert len(program) == sum(map(len, orders)), "the schedule deadlocks"
    return tuple(program)


def _needed(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """The (is forward, stage, micro-batch) of another stage that an action waits for, or None."""
    kind, stage, microbatch = action
    if kind == "F":
        return (True, stage - 1, microbatch) if stage else None
    if kind == "W" or stage == num_stages - 1:
        return None
    return (False, stage + 1, microbatch)


def _end_seconds(program: tuple[_Step, ...], seconds: StageSeconds) -> list[Floats]:
    """End of each action of the program, for every layout priced together."""
    # Of one layout the times are single numbers, which Python adds several times faster than numpy.
    is_one = seconds.forward.ndim == 1
    durations: dict[str, Any] = seconds.by_kind()
    if is_one:
        durations = {kind: values.tolist() for kind, values in durations.items()}
    zero, later = (0.0, max) if is_one else (np.zeros(seconds.forward.shape[1:]), np.maximum)
    hop: Any = float(seconds.hop) if is_one else seconds.hop
    ends: list[Any] = []
    for action, _, previous, needs, is_hop in program:
        start = ends[previous] if previous >= 0 else zero
        if needs >= 0:
            start = later(start, ends[needs] + hop if is_hop else ends[needs])
        ends.append(start + durations[action.kind][action.stage])
    return ends


def simulate(schedule: Schedule, shape: PipelineShape, seconds: StageSeconds) -> Timeline:
    """The timeline of a schedule with these stage times (one layout)."""
    program = _program(schedule, shape)
    durations, ends = seconds.by_kind(), _end_seconds(program, seconds)
    ranks: list[list[TimedAction]] = [[] for _ in range(shape.pp)]
    for step, end in zip(program, ends, strict=True):
        duration = durations[step.action.kind][step.action.stage]
        ranks[step.rank].append(TimedAction(step.action, float(end - duration), float(end)))
    return Timeline(tuple(tuple(rank) for rank in ranks))


def finish_seconds(schedule: Schedule, shape: PipelineShape, seconds: StageSeconds) -> Floats:
    """End of the last action; many micro-batches are extrapolated from a few by whole periods."""
    short, period = _short_shape(schedule, shape)
    finish = _finish(schedule, short, seconds)
    if short == shape:
        return finish
    shorter = PipelineShape(short.pp, short.virtual_stages, short.num_microbatches - period)
    per_microbatch = (finish - _finish(schedule, shorter, seconds)) / period
    return finish + (shape.num_microbatches - short.num_microbatches) * per_microbatch


def _finish(schedule: Schedule, shape: PipelineShape, seconds: StageSeconds) -> Floats:
    program = _program(schedule, shape)
    ends = _end_seconds(program, seconds)
    last = {step.rank: end for step, end in zip(program, ends, strict=True)}
    return np.max(np.stack(list(last.values())), axis=0)


def _short_shape(schedule: Schedule, shape: PipelineShape) -> tuple[PipelineShape, int]:
    """A shape with enough micro-batches for the steady state, and the period of that in micro-batches."""
    per_round = shape.microbatches_per_round
    interleaved = schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
    period = per_round if interleaved else shape.pp
    short = 4 * period + (0 if interleaved else shape.num_microbatches % period)
    if shape.num_microbatches <= short:
        return shape, period
    return PipelineShape(shape.pp, shape.virtual_stages, short), period
