"""The order in which each pipeline rank runs its forward and backward micro-batches.

Nothing here imports torch; a test compares these orders with what `torch.distributed.pipelining` executes.
`time/timeline.py` gives every action its seconds, `draw/schedule.py` draws the result.

A stage is a range of consecutive blocks; a rank has `virtual_stages` of them. Looped schedules place stage s
on rank s mod pp; V-shaped ones (zbv, dualpipev) place the first and the last stage on rank 0.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from meshwright.spec.parallel import Schedule

Kind = Literal["F", "B", "I", "W"]
SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
V_SHAPED: frozenset[Schedule] = frozenset({"zbv", "dualpipev"})
SPLIT_BACKWARD: frozenset[Schedule] = frozenset({"interleaved_zero_bubble", "zbv", "dualpipev"})
"""Schedules that run the input and the weight gradient as separate actions (not under torch.compile)."""
ONE_STAGE: frozenset[Schedule] = frozenset({"gpipe", "1f1b"})


class Action(NamedTuple):
    """One micro-batch in one stage: F forward, B full backward, I input and W weight gradient."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class PipelineShape:
    """The sizes that the order depends on, beside the schedule's name."""

    pp: int
    virtual_stages: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of the model."""
        return self.pp * self.virtual_stages

    @property
    def microbatches_per_round(self) -> int:
        """Micro-batches that an interleaved rank runs in one stage before it goes on to the next."""
        return self.num_microbatches // max(1, self.num_microbatches // self.pp)


RankActions = tuple[Action, ...]


def problem(schedule: Schedule, shape: PipelineShape) -> str | None:
    """The reason why this schedule cannot run with this shape, or None."""
    if schedule in ONE_STAGE and shape.virtual_stages != 1:
        return f"{schedule} has one stage per rank, not {shape.virtual_stages}"
    if schedule in V_SHAPED and shape.virtual_stages != 2:
        return f"{schedule} needs exactly 2 stages per rank, not {shape.virtual_stages}"
    if schedule == "1f1b" and shape.num_microbatches < shape.pp:
        return f"1f1b needs at least pp={shape.pp} micro-batches, not {shape.num_microbatches}"
    if schedule == "dualpipev" and shape.num_microbatches < shape.num_stages:
        return f"dualpipev needs at least {shape.num_stages} micro-batches, not {shape.num_microbatches}"
    interleaved = schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
    if interleaved and shape.num_microbatches % shape.microbatches_per_round:
        rounds = shape.num_microbatches // shape.pp
        return f"{schedule} needs a multiple of {rounds} micro-batches, not {shape.num_microbatches}"
    return None


def stage_rank(schedule: Schedule, stage: int, pp: int) -> int:
    """The pipeline rank of a stage."""
    if schedule in V_SHAPED:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def rank_stages(schedule: Schedule, rank: int, shape: PipelineShape) -> tuple[int, ...]:
    """The stages of a pipeline rank, in model order."""
    return tuple(s for s in range(shape.num_stages) if stage_rank(schedule, s, shape.pp) == rank)


@lru_cache(maxsize=512)
def actions(schedule: Schedule, shape: PipelineShape) -> tuple[RankActions, ...]:
    """The actions of every rank in execution order; `problem` must be None for this shape."""
    return tuple(rank_actions(schedule, rank, shape) for rank in range(shape.pp))


def rank_actions(schedule: Schedule, rank: int, shape: PipelineShape) -> RankActions:
    """The actions of one rank in execution order; `problem` must be None for this shape."""
    reason = problem(schedule, shape)
    if reason is not None:
        raise ValueError(reason)
    return tuple(_ORDERS[schedule](rank, shape))


def peak_in_flight(rank_actions: RankActions) -> float:
    """Most micro-batches whose activations a rank keeps at the same time, counted for each of its stages.

    Activations are kept from the forward to the end of the backward (to W where it is split: the weight
    gradient needs the layers' inputs).
    """
    kept = peak = 0.0
    for kind, _, _ in rank_actions:
        if kind == "F":
            kept += 1.0
            peak = max(peak, kept)
        elif kind in ("B", "W"):
            kept -= 1.0
    return peak


def _gpipe(rank: int, shape: PipelineShape) -> list[Action]:
    """All forwards, then all backwards."""
    microbatches = range(shape.num_microbatches)
    return [Action("F", rank, m) for m in microbatches] + [Action("B", rank, m) for m in microbatches]


def _one_forward_one_backward(rank: int, shape: PipelineShape) -> list[Action]:
    """Enough forwards to reach the last stage, then one backward for each forward."""
    microbatches = range(shape.num_microbatches)
    forwards = [Action("F", rank, m) for m in microbatches]
    backwards = [Action("B", rank, m) for m in microbatches]
    return _warm_up_then_alternate(forwards, backwards, shape.pp - 1 - rank)


def _warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    warm_up = min(warm_up, len(forwards))
    steady = zip(forwards[warm_up:], backwards, strict=False)
    cool_down = backwards[len(forwards) - warm_up :]
    return [*forwards[:warm_up], *chain.from_iterable(steady), *cool_down]


def _looped_breadth_first(rank: int, shape: PipelineShape) -> list[Action]:
    """Each stage sees all micro-batches before the next stage starts; backwards mirror that."""
    stages = range(rank, shape.num_stages, shape.pp)
    forwards = [Action("F", s, m) for s in stages for m in range(shape.num_microbatches)]
    return forwards + [Action("B", s, m) for _, s, m in reversed(forwards)]


def _rounds(rank: int, shape: PipelineShape, *, backward: bool) -> list[tuple[int, int]]:
    """(stage, micro-batch) of an interleaved rank: a round of micro-batches, stage by stage."""
    per_round, chunks = shape.microbatches_per_round, range(shape.virtual_stages)
    return [
        (chunk * shape.pp + rank, first + offset)
        for first in range(0, shape.num_microbatches, per_round)
        for chunk in (reversed(chunks) if backward else chunks)
        for offset in range(per_round)
    ]


def _interleaved(rank: int, shape: PipelineShape) -> list[Action]:
    """1f1b over several stages per rank: the bubble shrinks by virtual_stages, messages grow by it."""
    forwards = [Action("F", *where) for where in _rounds(rank, shape, backward=False)]
    backwards = [Action("B", *where) for where in _rounds(rank, shape, backward=True)]
    warm_up = (shape.virtual_stages - 1) * shape.microbatches_per_round + 2 * (shape.pp - 1 - rank)
    return _warm_up_then_alternate(forwards, backwards, warm_up)


def _interleaved_zero_bubble(rank: int, shape: PipelineShape) -> list[Action]:
    """Interleaved with split backwards: weight gradients lag `rank` behind, to fill later gaps."""
    forwards = [Action("F", *where) for where in _rounds(rank, shape, backward=False)]
    inputs = [Action("I", *where) for where in _rounds(rank, shape, backward=True)]
    weights = deque(Action("W", stage, microbatch) for _, stage, microbatch in inputs)
    warm_up = (shape.virtual_stages - 1) * shape.microbatches_per_round + shape.pp - 1 - rank
    ordered: list[Action] = []
    num_inputs = 0
    for action in _warm_up_then_alternate(forwards, inputs, warm_up):
        ordered.append(action)
        num_inputs += action.kind == "I"
        if action.kind == "I" and num_inputs > rank:
            ordered.append(weights.popleft())
    return [*ordered, *weights]


class _VShaped:
    """Collects the actions of one rank of a V-shaped schedule; micro-batches count per kind and stage."""

    def __init__(self, rank: int, shape: PipelineShape) -> None:
        self.down = rank
        self.up = shape.num_stages - 1 - rank
        self.ordered: list[Action] = []
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._pending: deque[Action] = deque()

    def add(self, kind: Kind, stage: int) -> None:
        """Append the next micro-batch of this kind on this stage; an I leaves its W pending."""
        counter: Kind = "I" if kind == "B" else kind
        microbatch = self._next[counter, stage]
        self._next[counter, stage] += 1
        self.ordered.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._pending.append(Action("W", stage, microbatch))

    def add_pending(self) -> None:
        """Append the oldest pending weight gradient, if there is one."""
        if self._pending:
            self.ordered.append(self._pending.popleft())

    def add_pending_of(self, stage: int) -> None:
        """Append every pending weight gradient of one stage, oldest first."""
        self.ordered += [action for action in self._pending if action.stage == stage]
        self._pending = deque(action for action in self._pending if action.stage != stage)

    def add_oldest_pending_of(self, stage: int) -> None:
        """Append the oldest pending weight gradient of one stage."""
        action = next(action for action in self._pending if action.stage == stage)
        self._pending.remove(action)
        self.ordered.append(action)

    def num(self, kind: Kind, stage: int) -> int:
        """Micro-batches of this kind on this stage so far."""
        return self._next[kind, stage]


def _zero_bubble_v(rank: int, shape: PipelineShape) -> list[Action]:
    """The V-shaped zero-bubble schedule: no bubble when F, I and W take equally long.

    The pattern is complete with 2 pp - 1 micro-batches; with fewer, the surplus is left out.
    """
    order, pp = _VShaped(rank, shape), shape.pp
    _zero_bubble_v_warm_up(order, rank, pp)
    num_pattern = max(2 * pp - 1, shape.num_microbatches)
    while order.num("F", order.up) < order.num("F", order.down) or order.num("F", order.down) < num_pattern:
        if order.num("F", order.down) < num_pattern:
            order.add("F", order.down)
        order.add("I", order.down)
        order.add_pending()
        order.add("F", order.up)
        order.add("I", order.up)
        order.add_pending()
    _zero_bubble_v_cool_down(order, rank, pp)
    return [action for action in order.ordered if action.microbatch < shape.num_microbatches]


def _zero_bubble_v_warm_up(order: _VShaped, rank: int, pp: int) -> None:
    for _ in range(2 * (pp - rank) - 1):
        order.add("F", order.down)
    for _ in range(rank):
        order.add("F", order.up)
        order.add("F", order.down)
    for _ in range(pp - rank):
        order.add("F", order.up)
        order.add("I", order.up)
        order.add_pending()


def _zero_bubble_v_cool_down(order: _VShaped, rank: int, pp: int) -> None:
    for _ in range(rank):
        order.add("I", order.down)
        order.add("I", order.up)
    for _ in range(pp - rank):
        order.add("I", order.down)
        order.add_oldest_pending_of(order.down)
    order.add_pending_of(order.up)
    order.add_pending_of(order.down)


def _dual_pipe_v(rank: int, shape: PipelineShape) -> list[Action]:
    """One direction of DualPipe, V-shaped: a forward of one half is paired with a backward of the other.

    torch runs the two actions of a pair one after the other, so they are listed in that order.
    """
    order, behind = _VShaped(rank, shape), shape.pp - 1 - rank
    _dual_pipe_v_warm_up(order, rank, behind)
    for _ in range(shape.num_microbatches - 2 * shape.pp + rank + 1):
        _add_all(order, (("F", order.down), ("B", order.up), ("F", order.up), ("B", order.down)))
    for _ in range(behind):
        _add_all(order, (("B", order.up), ("F", order.up), ("B", order.down)))
    _dual_pipe_v_cool_down(order, rank, behind)
    return order.ordered


def _add_all(order: _VShaped, steps: tuple[tuple[Kind, int], ...]) -> None:
    for kind, stage in steps:
        order.add(kind, stage)


def _dual_pipe_v_warm_up(order: _VShaped, rank: int, behind: int) -> None:
    for _ in range(2 * behind):
        order.add("F", order.down)
    for _ in range(rank + 1):
        order.add("F", order.down)
        order.add("F", order.up)
    for _ in range(behind):
        order.add("I", order.up)
        order.add_pending()
        order.add("F", order.up)


def _dual_pipe_v_cool_down(order: _VShaped, rank: int, behind: int) -> None:
    """Full backwards first; from the middle on they are split, and their W fill the gaps at the end."""
    tail = [order.up, order.down] * (rank + 1)
    # Odd and even ranks start to split at different actions of a pair, so that neighbours do not wait.
    first_split = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for position, stage in enumerate(tail):
        order.add("I" if position >= first_split else "B", stage)
    for _ in range(behind):
        order.add_pending()
        order.add("I", order.down)
    for _ in range(rank + 1):
        order.add_pending()


_ORDERS: dict[Schedule, Callable[[int, PipelineShape], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_breadth_first,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}
