"""The order in which each pipeline rank runs its forward and backward micro-batches.

Torch-free, and tested equal to what `torch.distributed.pipelining` executes. `timeline.py` puts seconds
on these orders; `draw_schedule.py` draws them.

A stage is a run of consecutive blocks; a rank holds `virtual_stages` of them. Looping schedules place
stage s on rank s mod pp; V-shaped ones (zbv, dualpipev) fold the line, so that the first and the last
stage meet on rank 0.
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
    """One stage works on one micro-batch: F forward, B whole backward, I input and W weight gradient."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class PipelineShape:
    """What decides the order, apart from the schedule's name."""

    pp: int
    virtual_stages: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Stages over the whole model."""
        return self.pp * self.virtual_stages

    @property
    def microbatches_per_round(self) -> int:
        """Micro-batches an interleaved rank passes through one stage before it turns to the next."""
        return self.num_microbatches // max(1, self.num_microbatches // self.pp)


RankActions = tuple[Action, ...]


def problem(schedule: Schedule, shape: PipelineShape) -> str | None:
    """Why this schedule cannot run on this shape, or None."""
    if schedule in ONE_STAGE and shape.virtual_stages != 1:
        return f"{schedule} holds one stage per rank, not {shape.virtual_stages}"
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
    """The pipeline rank that holds a stage."""
    if schedule in V_SHAPED:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def rank_stages(schedule: Schedule, rank: int, shape: PipelineShape) -> tuple[int, ...]:
    """The stages a pipeline rank holds, in model order."""
    return tuple(s for s in range(shape.num_stages) if stage_rank(schedule, s, shape.pp) == rank)


@lru_cache(maxsize=512)
def actions(schedule: Schedule, shape: PipelineShape) -> tuple[RankActions, ...]:
    """Every rank's actions in the order it runs them; `problem` must be None for this shape."""
    reason = problem(schedule, shape)
    if reason is not None:
        raise ValueError(reason)
    order = _ORDERS[schedule]
    return tuple(tuple(order(rank, shape)) for rank in range(shape.pp))


def peak_in_flight(rank_actions: RankActions, held_by_stage: dict[int, float] | None = None) -> float:
    """Most micro-batches of activations a rank holds at one moment, each weighted by its stage.

    Activations live from the forward to the end of the backward (to W where it is split: the weight
    gradient needs the layers' inputs). Unweighted, the unit is one stage, not one rank.
    """
    held = peak = 0.0
    for kind, stage, _ in rank_actions:
        weight = 1.0 if held_by_stage is None else held_by_stage[stage]
        if kind == "F":
            held += weight
            peak = max(peak, held)
        elif kind in ("B", "W"):
            held -= weight
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
    """(stage, micro-batch) of an interleaved rank: a round of micro-batches through each stage in turn."""
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


class _Folded:
    """Writes down the actions of one V-shaped rank; each (kind, stage) counts its own micro-batches."""

    def __init__(self, rank: int, shape: PipelineShape) -> None:
        self.down = rank
        self.up = shape.num_stages - 1 - rank
        self.ordered: list[Action] = []
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._owed: deque[Action] = deque()

    def add(self, kind: Kind, stage: int) -> None:
        """The next micro-batch of this kind on this stage; an I owes a W."""
        counter: Kind = "I" if kind == "B" else kind
        microbatch = self._next[counter, stage]
        self._next[counter, stage] += 1
        self.ordered.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._owed.append(Action("W", stage, microbatch))

    def pay_weight(self) -> None:
        """The oldest weight gradient that is still owed, if any."""
        if self._owed:
            self.ordered.append(self._owed.popleft())

    def pay_weights_of(self, stage: int) -> None:
        """Every weight gradient owed on one stage, oldest first."""
        self.ordered += [action for action in self._owed if action.stage == stage]
        self._owed = deque(action for action in self._owed if action.stage != stage)

    def pay_weight_of(self, stage: int) -> None:
        """The oldest weight gradient owed on one stage."""
        action = next(action for action in self._owed if action.stage == stage)
        self._owed.remove(action)
        self.ordered.append(action)

    def num(self, kind: Kind, stage: int) -> int:
        """Micro-batches of this kind so far."""
        return self._next[kind, stage]


def _zero_bubble_v(rank: int, shape: PipelineShape) -> list[Action]:
    """The folded zero-bubble schedule: no bubble when F, I and W take equally long.

    The pattern needs 2 pp - 1 micro-batches to close; with fewer, the surplus is left out.
    """
    fold, pp = _Folded(rank, shape), shape.pp
    _zero_bubble_v_warm_up(fold, rank, pp)
    num_pattern = max(2 * pp - 1, shape.num_microbatches)
    while fold.num("F", fold.up) < fold.num("F", fold.down) or fold.num("F", fold.down) < num_pattern:
        if fold.num("F", fold.down) < num_pattern:
            fold.add("F", fold.down)
        fold.add("I", fold.down)
        fold.pay_weight()
        fold.add("F", fold.up)
        fold.add("I", fold.up)
        fold.pay_weight()
    _zero_bubble_v_cool_down(fold, rank, pp)
    return [action for action in fold.ordered if action.microbatch < shape.num_microbatches]


def _zero_bubble_v_warm_up(fold: _Folded, rank: int, pp: int) -> None:
    for _ in range(2 * (pp - rank) - 1):
        fold.add("F", fold.down)
    for _ in range(rank):
        fold.add("F", fold.up)
        fold.add("F", fold.down)
    for _ in range(pp - rank):
        fold.add("F", fold.up)
        fold.add("I", fold.up)
        fold.pay_weight()


def _zero_bubble_v_cool_down(fold: _Folded, rank: int, pp: int) -> None:
    for _ in range(rank):
        fold.add("I", fold.down)
        fold.add("I", fold.up)
    for _ in range(pp - rank):
        fold.add("I", fold.down)
        fold.pay_weight_of(fold.down)
    fold.pay_weights_of(fold.up)
    fold.pay_weights_of(fold.down)


def _dual_pipe_v(rank: int, shape: PipelineShape) -> list[Action]:
    """DualPipe cut in half: forwards of one direction pair with backwards of the other.

    torch runs the two halves of a pair one after the other, so they stand here in that order.
    """
    fold, behind = _Folded(rank, shape), shape.pp - 1 - rank
    _dual_pipe_v_warm_up(fold, rank, behind)
    for _ in range(shape.num_microbatches - 2 * shape.pp + rank + 1):
        _add_all(fold, (("F", fold.down), ("B", fold.up), ("F", fold.up), ("B", fold.down)))
    for _ in range(behind):
        _add_all(fold, (("B", fold.up), ("F", fold.up), ("B", fold.down)))
    _dual_pipe_v_cool_down(fold, rank, behind)
    return fold.ordered


def _add_all(fold: _Folded, steps: tuple[tuple[Kind, int], ...]) -> None:
    for kind, stage in steps:
        fold.add(kind, stage)


def _dual_pipe_v_warm_up(fold: _Folded, rank: int, behind: int) -> None:
    for _ in range(2 * behind):
        fold.add("F", fold.down)
    for _ in range(rank + 1):
        fold.add("F", fold.down)
        fold.add("F", fold.up)
    for _ in range(behind):
        fold.add("I", fold.up)
        fold.pay_weight()
        fold.add("F", fold.up)


def _dual_pipe_v_cool_down(fold: _Folded, rank: int, behind: int) -> None:
    """Whole backwards first; from the middle on they are split, and their W fill the gaps at the end."""
    tail = [fold.up, fold.down] * (rank + 1)
    # Odd and even ranks split from another half of the pair on, so that neighbours do not wait.
    first_split = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for position, stage in enumerate(tail):
        fold.add("I" if position >= first_split else "B", stage)
    for _ in range(behind):
        fold.pay_weight()
        fold.add("I", fold.down)
    for _ in range(rank + 1):
        fold.pay_weight()


_ORDERS: dict[Schedule, Callable[[int, PipelineShape], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_breadth_first,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}
