"""What a pipeline rank holds when an action of its schedule begins, in counts of micro-batches and stages.

The order of a schedule decides which micro-batches are in flight, and which stages have gradients already.
A snapshot counts both at one action. Of all snapshots of a rank those remain that may be its peak. Without a
pipeline the micro-batches of a step follow each other in the single stage.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.memory.snapshot import EMPTY, NUM_KEYS, Snapshot
from meshwright.plan.workload.layouts import Floats, Ints, Layouts
from meshwright.plan.workload.schedules import (
    SCHEDULES,
    Action,
    PipelineShape,
    problem,
    rank_actions,
    rank_stages,
)
from meshwright.spec.parallel import Schedule

REPEATED_ROUNDS = 3
"""From so many micro-batches per rank on the order of a schedule repeats itself."""


class Counts:
    """The counts of many snapshots by field of Snapshot: each array is made when it is read."""

    def __init__(self, table: Floats, row: NDArray[np.intp], further: Floats) -> None:
        self._table, self._row, self._further = table, row, further
        self._known: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        if name not in self._known:
            column = _COLUMNS[name]
            values, slopes = self._table[:, column], self._table[:, column + WIDTH]
            found = values[self._row]
            # Breadth-first schedules hold more by the same amount with each further micro-batch.
            self._known[name] = found + slopes[self._row] * self._further if slopes.any() else found
        return self._known[name]


_COLUMNS = {name: 2 + index for index, name in enumerate(Snapshot._fields[1:])}
WIDTH = 1 + len(Snapshot._fields)


class Snapshots:
    """Snapshots of many layouts; every array has one entry for each of them."""

    def __init__(
        self, table: Floats, layout: NDArray[np.intp], row: NDArray[np.intp], further: Floats
    ) -> None:
        self.layout = layout
        """Which layout."""
        self.rank = table[row, 0].astype(np.intp)
        """0, 1 or 2: the first, the second and the last pipeline rank."""
        self.kind = KINDS[table[row, 1].astype(np.intp)]
        self.counts = Counts(table, row, further)
        self._table, self._row, self._further = table, row, further

    def of_kind(self, *kinds: str) -> "Snapshots":
        """Those of some kinds of actions."""
        rows = np.isin(self.kind, kinds)
        return Snapshots(self._table, self.layout[rows], self._row[rows], self._further[rows])


def snapshots(at: Layouts) -> Snapshots:
    """The snapshots of every layout."""
    micro = _capped(at)
    code = np.zeros(len(at), dtype=np.int64)
    for column in (at.schedule, at.pp, at.virtual_stages, micro):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    keys = zip(at.schedule[first], at.pp[first], at.virtual_stages[first], micro[first], strict=True)
    tables = [_table(*(int(part) for part in key)) for key in keys]
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    counts = sizes[inverse]
    layout = np.repeat(np.arange(len(at)), counts)
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    offsets = np.arange(len(layout)) - np.repeat(np.cumsum(counts) - counts, counts)
    further = (at.num_microbatches - micro).astype(np.float64)[layout]
    table = np.concatenate([*tables, np.zeros((0, 2 * WIDTH))])
    return Snapshots(table, layout, begins[inverse][layout] + offsets, further)


KINDS = np.array(["F", "B", "I", "W", "end"])


def _capped(at: Layouts) -> Ints:
    """As few micro-batches as have the same snapshots, but for the input gradients of split backwards."""
    splits = np.isin(at.schedule, [index for index, name in enumerate(SCHEDULES) if name in _COUNTED])
    rounds = np.maximum(at.num_microbatches // at.pp, 1)
    per_round = at.num_microbatches // rounds
    few = np.where(at.num_microbatches % rounds == 0, per_round * np.minimum(rounds, REPEATED_ROUNDS), 0)
    few = np.where(few == 0, np.minimum(at.num_microbatches, REPEATED_ROUNDS * at.pp), few)
    few = np.where(at.schedule == SCHEDULES.index("1f1b"), np.minimum(at.num_microbatches, at.pp + 2), few)
    breadth_first = [SCHEDULES.index(name) for name in BREADTH_FIRST]
    few = np.where(np.isin(at.schedule, breadth_first), np.minimum(at.num_microbatches, MANY), few)
    single = np.minimum(at.num_microbatches, 3)
    return np.where(at.pp == 1, single, np.where(splits, at.num_microbatches, few))


_COUNTED = frozenset({"interleaved_zero_bubble", "zbv", "dualpipev"})
"""Schedules that keep something of every micro-batch until the step ends."""
BREADTH_FIRST: tuple[Schedule, ...] = ("gpipe", "looped_bfs")
MANY = 8
"""From so many micro-batches on these schedules hold most at the same actions."""


@cache
def _table(schedule: int, pp: int, virtual: int, micro: int) -> Floats:
    """Rows of rank, kind and counts, and what each further micro-batch adds to them."""
    name, shape = SCHEDULES[schedule], PipelineShape(pp, virtual, micro)
    found: list[tuple[int, ...]] = []
    if pp == 1:
        listed = [(rank, one) for one in _single(micro) for rank in (0,)]
    elif problem(name, shape) is not None:
        listed = [(rank, one) for rank in range(3) for one in _single(min(micro, pp))]
    else:
        listed = [
            (column, one)
            for column, rank in ((0, 0), (1, 1), (2, pp - 1))
            if column != 1 or pp > 2
            for one in rank_snapshots(name, rank, shape)
        ]
    kinds = list(KINDS)
    found = [(rank, kinds.index(one.kind), *one[1:]) for rank, one in listed]
    rows = np.array(found, dtype=np.float64)
    slopes = np.zeros_like(rows)
    if pp > 1 and name in BREADTH_FIRST and micro == MANY:
        slopes[:, 2:] = np.array([_slope(one, rank) for rank, one in listed])
    return np.concatenate([rows, slopes], axis=1)


def _slope(one: Snapshot, column: int) -> tuple[int, ...]:
    """What a further micro-batch adds to a snapshot of a breadth-first schedule."""
    if one.kind == "end":
        return (0,) * (len(one) - 1)
    stages = -(-(one.kept + 1) // MANY)  # that have run all forwards, the row's one included
    is_first_rank = column == 0
    grown = {
        "kept": stages,
        "kept_first": int(is_first_rank),
        "kept_last": one.in_last_stage,
        "sent": stages - one.in_last_stage,
    }
    return tuple(grown.get(name, 0) for name in Snapshot._fields[1:])


_GRADIENT_COUNTS = (*("graded", "graded_first", "graded_last", "summed", "summed_first", "summed_last"),)


def _single(micro: int) -> list[Snapshot]:
    """Snapshots of a rank with one stage that runs micro-batch after micro-batch."""
    found: list[Snapshot] = []
    for index in range(micro):
        has, final = int(index > 0), int(index == micro - 1)
        full = dict.fromkeys(("has_gradients", *_GRADIENT_COUNTS), has)
        found += [EMPTY._replace(kind=kind, is_final=final, **full) for kind in "FB"]
    return _largest([*found, EMPTY._replace(kind="end")])


def rank_snapshots(schedule: Schedule, rank: int, shape: PipelineShape) -> list[Snapshot]:
    """The snapshots of one pipeline rank that may be its peak."""
    if schedule in BREADTH_FIRST:
        return _largest(_breadth_first(rank, shape))
    here = rank_stages(schedule, rank, shape)
    return _largest(_Walk(here, shape.num_stages - 1).run(rank_actions(schedule, rank, shape)))


def _breadth_first(rank: int, shape: PipelineShape) -> list[Snapshot]:
    """All forwards, stage by stage, then all backwards: in closed form, as there may be many micro-batches.

    Between a rank's first two stages and its last one what is held changes by the same amount each.
    """
    pp, num_stages, micro = shape.pp, shape.virtual_stages, shape.num_microbatches
    is_first_rank, is_last_rank = rank == 0, rank == pp - 1
    found: list[Snapshot] = []
    for index in sorted({0, min(1, num_stages - 1), num_stages - 1}):
        is_first, is_last = is_first_rank and index == 0, is_last_rank and index == num_stages - 1
        behind = num_stages - 1 - index
        # The last F; the first, the second and the third B.
        for kind, before in (("F", 0), ("B", 0), ("B", 1), ("B", 2)):
            if before >= micro:
                continue
            own, has = micro - 1 - before, int(before > 0)
            graded = 0 if kind == "F" else behind + has
            summed = 0 if kind == "F" else behind + int(before > 1)
            kept = index * micro + own
            found.append(
                EMPTY._replace(
                    kind=kind,
                    in_first_stage=int(is_first),
                    in_last_stage=int(is_last),
                    sends=int(not is_last),
                    has_gradients=has if kind == "B" else 0,
                    kept=kept,
                    kept_first=(own if index == 0 else micro) if is_first_rank else 0,
                    kept_last=own if is_last else 0,
                    sent=kept - (own if is_last else 0),
                    graded=graded,
                    graded_first=int(is_first and graded > 0),
                    graded_last=int(is_last_rank and graded > 0),
                    sent_back=int(graded > 0 and not (is_first and num_stages == 1)),
                    summed=summed,
                    summed_first=int(is_first and before > 1),
                    summed_last=int(is_last_rank and summed > 0),
                    latest=int(graded > 0),
                    latest_first=int(is_first and has),
                    latest_last=int(is_last_rank and graded > 0 and (is_last or (behind == 1 and not has))),
                )
            )
    end = {"graded": num_stages, "graded_first": int(is_first_rank), "graded_last": int(is_last_rank)}
    end |= {"in_first_stage": 0, "in_last_stage": 0, "sent_back": int(not is_first_rank)}
    return [*found, EMPTY._replace(kind="end", **end)]


class _Walk:
    """Follows the actions of a rank and counts."""

    def __init__(self, stages: tuple[int, ...], last_stage: int) -> None:
        self.last_stage = last_stage
        self.senders = {one for one in stages if one != last_stage and one + 1 not in stages}
        self.receivers = {one for one in stages if one != 0 and one - 1 not in stages}
        self.kept = dict.fromkeys((*stages, 0, last_stage), 0)
        self.waiting = dict(self.kept)
        self.backwards = dict(self.kept)
        self.num_kept = self.num_waiting = self.sent = self.finished_last = self.input_gradients = 0
        self.graded = self.summed = self.latest = (0, 0, 0)
        """How many stages have gradients, and whether the model's first and last are among them; the same
        without the latest backward; and the stage of that one alone."""
        self.latest_stage = -1

    def run(self, actions: tuple[Action, ...]) -> list[Snapshot]:
        """The snapshots of all actions."""
        found: list[Snapshot] = []
        for kind, stage, _ in actions:
            if kind == "I" and stage == 0:
                continue  # torch does nothing: W runs the full backward
            kind = "B" if kind == "W" and stage == 0 else kind
            self._leave(kind, stage)
            found.append(self._snapshot(kind, stage))
            self._enter(kind, stage)
        found.append(self._snapshot("end", -1))
        return found

    def _leave(self, kind: str, stage: int) -> None:
        if kind in ("B", "I"):
            self._keep(stage, -1)
        elif kind == "W":
            self._wait(stage, -1)

    def _enter(self, kind: str, stage: int) -> None:
        if kind == "F":
            self._keep(stage, 1)
        elif kind == "I":
            self._wait(stage, 1)
            self.input_gradients += stage in self.receivers
        else:
            self._grade(stage)
            self.finished_last += kind == "W" and stage == self.last_stage

    def _keep(self, stage: int, change: int) -> None:
        self.kept[stage] += change
        self.num_kept += change
        self.sent += change if stage in self.senders else 0

    def _wait(self, stage: int, change: int) -> None:
        self.waiting[stage] += change
        self.num_waiting += change
        self.sent += change if stage in self.senders else 0

    def _grade(self, stage: int) -> None:
        """A backward has left gradients in a stage."""
        self.backwards[stage] += 1
        self.latest_stage = stage
        self.graded = self._ends([one for one, count in self.backwards.items() if count])
        earlier = [one for one, count in self.backwards.items() if count > (one == stage)]
        self.summed, self.latest = self._ends(earlier), self._ends([stage])

    def _ends(self, stages: list[int]) -> tuple[int, int, int]:
        """How many stages, and whether the model's first and last are among them."""
        return len(stages), int(0 in stages), int(self.last_stage in stages)

    def _snapshot(self, kind: str, stage: int) -> Snapshot:
        last = self.last_stage
        has_gradients = stage >= 0 and self.backwards[stage] > 0
        adds = kind in "FB"
        return Snapshot(
            *(kind, int(stage == 0), int(stage == last), int(stage in self.senders), int(has_gradients), 0),
            *(self.num_kept, self.kept[0], self.kept[last], self.num_waiting, self.waiting[last]),
            *(self.sent, self.finished_last, self.input_gradients),
            *self.graded,
            int(self.latest_stage in self.receivers),
            *(self.summed if adds else (0, 0, 0)),
            *(self.latest if adds else (0, 0, 0)),
        )


_WEIGHTS = np.array(
    [
        # What a snapshot holds grows with each count; beside what a stage keeps of one micro-batch (1), its
        # gradients may be anything, its head little or much.
        [getattr(EMPTY._replace(**weights), name) for name in Snapshot._fields[NUM_KEYS:]]
        for gradients in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
        for head in (0.1, 1.0)
        for weights in [
            {
                "kept": 1.0,
                "kept_first": 0.01,
                "kept_last": head,
                "waiting": 1.5,
                "waiting_last": head,
                "finished_last": 0.4,
                "sent": 0.05,
                "input_gradients": 0.05,
                "graded": gradients,
                "graded_first": 0.1 * gradients,
                "graded_last": 0.1 * gradients,
                "summed": 0.01 * gradients,
                "latest": 0.01 * gradients,
            }
        ]
    ]
)


def _largest(found: list[Snapshot]) -> list[Snapshot]:
    """Those of each kind of action that are the largest by some weights.

    What is held is a sum of the counts times bytes, so that snapshots between two others are never the peak.
    """
    groups: dict[tuple[object, ...], list[Snapshot]] = {}
    for one in dict.fromkeys(found):
        # A forward does not change with what its stage has.
        groups.setdefault(one[:NUM_KEYS] if one.kind != "F" else one[:4], []).append(one)
    kept: list[Snapshot] = []
    for group in groups.values():
        if len(group) == 1:
            kept += group
            continue
        counts = np.array([one[NUM_KEYS:] for one in group], dtype=np.float64)
        kept += [group[index] for index in sorted(set((counts @ _WEIGHTS.T).argmax(axis=0).tolist()))]
    return kept
