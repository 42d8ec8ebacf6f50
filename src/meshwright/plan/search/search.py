"""Prices every layout of a question and keeps what an answer needs.

Nothing is sampled. For the fastest plan, worlds are priced from the largest down, and smaller ones are
skipped only once even a perfect device could not make them faster than what was found. Layouts that do
not fit are counted, and the least_memory of them kept, so that "it does not fit" comes with a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.search.question import Objective, Priced, Question, price, price_memory, price_time
from meshwright.plan.search.space import (
    MIN_CP_POSITIONS_IF_NEEDED,
    Table,
    expand,
    least_memory,
    meshes,
    where,
)
from meshwright.plan.workload.layouts import (
    RECOMPUTE_NONE,
    Ints,
    Layouts,
)

TIE_FRACTION = 0.05
"""Plans this close are equally fast: the prediction errs by more. The simplest of them is taken."""
MIN_OFFLOAD_GAIN = 0.1
"""How much faster offload must be where something fits without: no published run tells how copies hide."""
FAST_HOST_BYTES_PER_SECOND = 200e9
"""Of a superchip's link to its CPU, where that is worth asking; over PCIe host memory is for need alone."""
BLOCK_MESHES = 128
MAX_KEPT = 20_000
GROUP_COLUMNS = (
    "dp_replicate",
    "dp_shard",
    "zero",
    "cp",
    "tp",
    "pp",
    "ep",
    "recompute",
    "schedule",
    "offload",
)


@dataclass(frozen=True)
class SearchResult:
    """What the search kept: the best of every kind of layout, and the least_memory that does not fit."""

    fitting: Priced
    num_considered: int
    num_fitting: int
    least_memory: Priced | None
    """The layout with the lowest need, when nothing fits; its step time is priced as if it fitted."""


def search(
    question: Question, *, ranks: range | None = None, within_seconds: float | None = None
) -> SearchResult:
    """Price every layout on at most the cluster's devices (or with a world size in `ranks`).

    With `within_seconds`, every layout that is at least as fast counts, not only the best.
    """
    sizes = ranks or range(1, question.cluster.num_devices + 1)
    found = _search(question, sizes, within_seconds)
    if len(found.fitting) == 0 and question.min_cp_positions > MIN_CP_POSITIONS_IF_NEEDED:
        question = replace(question, min_cp_positions=MIN_CP_POSITIONS_IF_NEEDED)
        found = _search(question, sizes, within_seconds)
    if not question.may_offload:
        return found
    if len(found.fitting) == 0:
        return _with_offload(question, found, sizes, within_seconds)
    return _faster_with_offload(question, found, sizes)


def _with_offload(
    question: Question, found: SearchResult, ranks: range, within_seconds: float | None
) -> SearchResult:
    """Nothing fits on the devices alone: with host memory, from little to much of it."""
    if found.least_memory is None and found.num_considered == 0:
        return found
    moved = _search(replace(question, offloads=True), ranks, within_seconds)
    return moved if len(moved.fitting) or moved.least_memory is not None else found


def _faster_with_offload(question: Question, found: SearchResult, ranks: range) -> SearchResult:
    """Where the best plan recomputes: what host memory makes clearly faster, or cheaper."""
    score = found.fitting.score(question.objective)
    best = int(score.argmin())
    recomputes = int(found.fitting.layouts.recompute[best]) != RECOMPUTE_NONE
    is_fast = question.cluster.host.bytes_per_second >= FAST_HOST_BYTES_PER_SECOND
    if question.objective == "memory" or not recomputes or not is_fast:
        return found
    limit, within = float(score[best]) * (1.0 - MIN_OFFLOAD_GAIN), None
    if question.objective == "speed":
        ranks, within = range(max(ranks.start, int(found.fitting.layouts.num_ranks[best])), ranks.stop), limit
    moved = _search(replace(question, offloads=True), ranks, within)
    better = moved.fitting.take(moved.fitting.score(question.objective) <= limit)
    if len(better) == 0:
        return found
    return replace(
        found,
        fitting=concatenate([better, found.fitting]),
        num_considered=found.num_considered + moved.num_considered,
        num_fitting=found.num_fitting + moved.num_fitting,
    )


def search_meshes(question: Question, table: Table) -> SearchResult:
    """Price every layout on these meshes alone."""
    kept = _Kept(question, None)
    kept.add(table)
    return kept.found()


def _search(question: Question, ranks: range, within_seconds: float | None) -> SearchResult:
    table = _fastest_kinds(question, meshes(question.space, ranks))
    kept = _Kept(question, within_seconds)
    for block in _blocks(table):
        if kept.cannot_improve(int(block["num_ranks"].max())):
            break
        kept.add(block)
    return kept.found()


def lower_bound_seconds(question: Question, num_ranks: int) -> float:
    """No step on this many devices is faster: every model FLOP at the best matmul rate ever measured."""
    work, data = question.work, question.run.data
    flops = work.model_flops_per_token * data.batch_sequences * data.sequence_length
    return flops / (num_ranks * question.cluster.device.matmul_ceiling(work.matmul_rate))


def _blocks(table: Table) -> Iterator[Table]:
    """The largest worlds first, a block at a time."""
    order = np.argsort(-table["num_ranks"], kind="stable")
    for first in range(0, len(order), BLOCK_MESHES):
        rows = order[first : first + BLOCK_MESHES]
        yield {name: column[rows] for name, column in table.items()}


def _fastest_kinds(question: Question, table: Table) -> Table:
    """Of the kinds of context parallel the fastest for each cut: the rest does not change that."""
    if len(table["cp"]) == 0 or int(table["cp"].max()) == 1 or "cp_kind" in question.pins.allowed:
        return table
    columns = ("tp", "cp", "ep", "etp", "cp_kind", "cp_inner")
    distinct = np.unique(np.stack([table[name] for name in columns], axis=1), axis=0)
    probes = Layouts(**_probe_columns(dict(zip(columns, distinct.T, strict=True))))
    seconds = price_time(question, probes).step_seconds
    fastest: dict[tuple[int, ...], tuple[float, int]] = {}
    for row, cut in enumerate(distinct):
        key = tuple(int(value) for value in cut[:4])
        fastest[key] = min(fastest.get(key, (np.inf, -1)), (float(seconds[row]), row))
    chosen = {tuple(int(value) for value in distinct[row]) for _, row in fastest.values()}
    codes = _codes(
        [table[name] for name in columns], [np.array([cut[i] for cut in chosen]) for i in range(6)]
    )
    return where(table, codes)


def _codes(columns: list[Ints], allowed: list[Ints]) -> NDArray[np.bool_]:
    """Rows whose columns together equal one of the allowed rows."""
    mask = np.zeros(len(columns[0]), bool)
    for row in range(len(allowed[0])):
        mask |= np.logical_and.reduce([c == a[row] for c, a in zip(columns, allowed, strict=True)])
    return mask


def _probe_columns(cut: Mapping[str, Ints]) -> dict[str, Ints]:
    one = np.ones_like(cut["tp"])
    shards = np.maximum(cut["ep"] // np.gcd(cut["ep"], cut["cp"]), 1)
    return {
        **cut,
        "dp_replicate": one,
        "dp_shard": shards,
        "zero": np.where(shards * cut["cp"] > 1, 1, 0),
        "pp": one,
        "virtual_stages": one,
        "microbatch_sequences": one,
        "num_microbatches": one,
        "recompute": 0 * one,
        "recompute_every": one,
        "schedule": one,
        "offload": 0 * one,
        "reduce_last": 0 * one,
        "regather": 0 * one,
    }


class _Kept:
    """Gathers block after block; the best of each group of like layouts survives."""

    def __init__(self, question: Question, within_seconds: float | None) -> None:
        self._question = question
        self._within_seconds = within_seconds
        self._parts: list[Priced] = []
        self._leanest: Priced | None = None
        self._leanest_bound: Priced | None = None
        """Of meshes that are too small for any layout."""
        self._best_seconds = np.inf
        self._some_possible = False
        self.num_considered = 0
        self.num_fitting = 0

    def cannot_improve(self, num_ranks: int) -> bool:
        """Whether no world of this size or smaller can be faster than what was found."""
        perfect = lower_bound_seconds(self._question, num_ranks)
        if self._within_seconds is not None:
            return perfect > self._within_seconds
        return self._question.objective == "speed" and perfect > self._best_seconds

    def add(self, block: Table) -> None:
        """Price one block of meshes."""
        question = self._question
        lean = least_memory(question.space, block)
        least = price_memory(question, lean).peak_device_bytes.reshape(-1, 3).min(axis=1)
        possible = least <= question.memory_budget_bytes
        at = expand(question.space, where(block, possible))
        self.num_considered += len(at) + 3 * int((~possible).sum())
        if not possible.all():
            too_small = lean.take(np.repeat(~possible, 3))
            self._leanest_bound = self._leaner(self._leanest_bound, too_small)
        self._some_possible = self._some_possible or bool(possible.any())
        if len(at) == 0:
            return
        needed = price_memory(question, at)
        reserved = needed.peak_device_bytes
        fits = (reserved <= question.memory_budget_bytes) & needed.fits_host(question.cluster)
        self.num_fitting += int(fits.sum())
        if not fits.any():
            self._leanest = self._leaner(self._leanest, at.take(np.atleast_1d(reserved.argmin())))
            return
        fitting = at.take(fits)
        priced = Priced(fitting, reserved[fits], price_time(question, fitting).step_seconds)
        if self._within_seconds is not None:
            priced = priced.take(priced.step_seconds <= self._within_seconds)
        if len(priced) == 0:
            return
        self._best_seconds = min(self._best_seconds, float(priced.step_seconds.min()))
        self._parts.append(best_of_groups(priced, question.objective))

    def _leaner(self, known: Priced | None, at: Layouts) -> Priced:
        priced = price(self._question, at)
        row = priced.take([int(priced.device_bytes.argmin())])
        return row if known is None or row.device_bytes[0] < known.device_bytes[0] else known

    def found(self) -> SearchResult:
        """Everything kept, the best first."""
        nothing = price(self._question, _no_layouts())
        fitting = concatenate(self._parts) if self._parts else nothing
        order = np.argsort(fitting.score(self._question.objective), kind="stable")[:MAX_KEPT]
        # Meshes with room, yet no layout on them: the pins contradict each other, and no number helps.
        bound = None if self._some_possible else self._leanest_bound
        return SearchResult(
            fitting.take(order), self.num_considered, self.num_fitting, self._leanest or bound
        )


def _no_layouts() -> Layouts:
    return Layouts(**{f.name: np.zeros(0, np.int64) for f in fields(Layouts)})


def concatenate(parts: list[Priced]) -> Priced:
    """One table of several."""
    names = list(vars(parts[0].layouts))
    columns = {name: np.concatenate([getattr(part.layouts, name) for part in parts]) for name in names}
    return Priced(
        Layouts(**columns),
        np.concatenate([part.device_bytes for part in parts]),
        np.concatenate([part.step_seconds for part in parts]),
    )


def best_of_groups(priced: Priced, objective: Objective) -> Priced:
    """The best, the fastest and the least_memory layout of each group that agrees in GROUP_COLUMNS."""
    keys = np.stack([getattr(priced.layouts, name) for name in GROUP_COLUMNS], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    rows: list[NDArray[np.intp]] = []
    for score in (priced.score(objective), priced.step_seconds, priced.device_bytes):
        order = np.lexsort((score, inverse.ravel()))
        _, first = np.unique(inverse.ravel()[order], return_index=True)
        rows.append(order[first])
    return priced.take(np.unique(np.concatenate(rows)))
