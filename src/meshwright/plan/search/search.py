"""Prices every layout of a question and keeps the ones that an answer needs.

The search is exhaustive. For the fastest plan it prices the largest worlds first, and skips smaller ones once
even a device at its best matmul rate could not make them faster than the best layout so far. Layouts that do
not fit are counted, and the one with the least memory is kept, so that "it does not fit" has a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.search.meshes import Table, filter_rows, meshes
from meshwright.plan.search.question import (
    MIN_CP_POSITIONS_IF_NEEDED,
    Objective,
    Priced,
    Question,
    fitting_rows,
    price,
    price_memory,
    price_time,
)
from meshwright.plan.search.space import expand, least_memory_layouts
from meshwright.plan.workload.layouts import RECOMPUTE_NONE, Ints, Layouts

TIE_FRACTION = 0.05
"""Plans this close are equally fast, because the prediction is less exact. The simplest of them is chosen."""
MIN_OFFLOAD_GAIN = 0.1
"""How much faster offload must be where a layout fits without: no published run shows how copies overlap."""
FAST_HOST_BYTES_PER_SECOND = 200e9
"""A superchip's link to its CPU. Over slower links, offload is only for what does not fit otherwise."""
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
    """What the search kept: the best layouts of every group, and the closest one where none fits."""

    fitting: Priced
    num_considered: int
    num_fitting: int
    least_memory: Priced | None
    """The layout with the least memory where none fits; None where the pins leave no layout at all."""


def search(
    question: Question, *, ranks: range | None = None, within_seconds: float | None = None
) -> SearchResult:
    """Price every layout on at most the cluster's devices, or with a world size in `ranks`.

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


def search_meshes(question: Question, mesh_table: Table) -> SearchResult:
    """Price every layout on these meshes only."""
    collector = _Collector(question, None)
    collector.add(mesh_table)
    return collector.result()


def lower_bound_seconds(question: Question, num_ranks: int) -> float:
    """No step on this many devices is faster: every model FLOP at the best matmul rate ever measured."""
    workload, data = question.workload, question.run.data
    flops = workload.model_flops_per_token * data.batch_sequences * data.sequence_length
    return flops / (num_ranks * question.cluster.device.matmul_ceiling(workload.matmul_rate))


def least_bytes(question: Question) -> float:
    """Bytes per device that every layout needs at least, with offload; infinite where there is no layout."""
    question = replace(question, offloads=question.may_offload)
    table = meshes(question, range(1, question.cluster.num_devices + 1))
    if len(table["tp"]) == 0:
        return float("inf")
    return float(price_memory(question, least_memory_layouts(question, table)).peak_device_bytes.min())


def _with_offload(
    question: Question, found: SearchResult, ranks: range, within_seconds: float | None
) -> SearchResult:
    """The search with host memory, where nothing fits on the devices alone."""
    if found.least_memory is None and found.num_considered == 0:
        return found
    offloaded = _search(replace(question, offloads=True), ranks, within_seconds)
    return offloaded if len(offloaded.fitting) or offloaded.least_memory is not None else found


def _faster_with_offload(question: Question, found: SearchResult, ranks: range) -> SearchResult:
    """With the layouts added that offload instead of recompute and are clearly better for it."""
    score = found.fitting.score(question.objective)
    best = int(score.argmin())
    recomputes = int(found.fitting.layouts.recompute[best]) != RECOMPUTE_NONE
    is_fast = question.cluster.host.bytes_per_second >= FAST_HOST_BYTES_PER_SECOND
    if question.objective == "memory" or not recomputes or not is_fast:
        return found
    limit, within = float(score[best]) * (1.0 - MIN_OFFLOAD_GAIN), None
    if question.objective == "speed":
        ranks, within = range(max(ranks.start, int(found.fitting.layouts.num_ranks[best])), ranks.stop), limit
    offloaded = _search(replace(question, offloads=True), ranks, within)
    better = offloaded.fitting.take(offloaded.fitting.score(question.objective) <= limit)
    if len(better) == 0:
        return found
    return replace(
        found,
        fitting=concatenate([better, found.fitting]),
        num_considered=found.num_considered + offloaded.num_considered,
        num_fitting=found.num_fitting + offloaded.num_fitting,
    )


def _search(question: Question, ranks: range, within_seconds: float | None) -> SearchResult:
    table = _fastest_cp_kinds(question, meshes(question, ranks))
    collector = _Collector(question, within_seconds)
    for block in _blocks(table):
        if collector.cannot_improve(int(block["num_ranks"].max())):
            break
        collector.add(block)
    return collector.result()


def _blocks(table: Table) -> Iterator[Table]:
    """The meshes in blocks, the largest worlds first."""
    order = np.argsort(-table["num_ranks"], kind="stable")
    for first in range(0, len(order), BLOCK_MESHES):
        rows = order[first : first + BLOCK_MESHES]
        yield {name: column[rows] for name, column in table.items()}


def _fastest_cp_kinds(question: Question, table: Table) -> Table:
    """The fastest kind of context parallel for each model sharding: pp, dp and batch do not change which."""
    if len(table["cp"]) == 0 or int(table["cp"].max()) == 1 or "cp_kind" in question.pins.allowed:
        return table
    columns = ("tp", "cp", "ep", "etp", "cp_kind", "cp_inner")
    rows = np.stack([table[name] for name in columns], axis=1)
    distinct, index = np.unique(rows, axis=0, return_inverse=True)
    probes = Layouts(**_probe_columns(dict(zip(columns, distinct.T, strict=True))))
    seconds = price_time(question, probes).step_seconds
    fastest: dict[tuple[int, ...], tuple[float, int]] = {}
    for row, sharding in enumerate(distinct):
        key = tuple(int(value) for value in sharding[:4])
        fastest[key] = min(fastest.get(key, (np.inf, -1)), (float(seconds[row]), row))
    return filter_rows(table, np.isin(index.ravel(), [row for _, row in fastest.values()]))


def _probe_columns(sharding: Mapping[str, Ints]) -> dict[str, Ints]:
    one = np.ones_like(sharding["tp"])
    shards = np.maximum(sharding["ep"] // np.gcd(sharding["ep"], sharding["cp"]), 1)
    return {
        **sharding,
        "dp_replicate": one,
        "dp_shard": shards,
        "zero": np.where(shards * sharding["cp"] > 1, 1, 0),
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


class _Collector:
    """Prices block after block of meshes and keeps the best layouts of each group."""

    def __init__(self, question: Question, within_seconds: float | None) -> None:
        self._question = question
        self._within_seconds = within_seconds
        self._parts: list[Priced] = []
        self._least_memory: Priced | None = None
        self._least_memory_bound: Priced | None = None
        """The same among meshes on which no layout can fit."""
        self._best_seconds = np.inf
        self._some_mesh_fits = False
        self._num_considered = 0
        self._num_fitting = 0

    def cannot_improve(self, num_ranks: int) -> bool:
        """Whether no world of this size or smaller can be faster than the best so far."""
        bound = lower_bound_seconds(self._question, num_ranks)
        if self._within_seconds is not None:
            return bound > self._within_seconds
        return self._question.objective == "speed" and bound > self._best_seconds

    def add(self, block: Table) -> None:
        """Price one block of meshes."""
        layouts = self._layouts_that_may_fit(block)
        if len(layouts) == 0:
            return
        needed = price_memory(self._question, layouts)
        device_bytes, fits = needed.peak_device_bytes, fitting_rows(self._question, needed)
        self._num_fitting += int(fits.sum())
        if not fits.any():
            closest = layouts.take(np.atleast_1d(device_bytes.argmin()))
            self._least_memory = self._smaller(self._least_memory, closest)
            return
        fitting = layouts.take(fits)
        priced = Priced(fitting, device_bytes[fits], price_time(self._question, fitting).step_seconds)
        if self._within_seconds is not None:
            priced = priced.take(priced.step_seconds <= self._within_seconds)
        if len(priced) == 0:
            return
        self._best_seconds = min(self._best_seconds, float(priced.step_seconds.min()))
        self._parts.append(best_of_groups(priced, self._question.objective))

    def _layouts_that_may_fit(self, block: Table) -> Layouts:
        """Every layout on the meshes whose layout with the least memory fits the device."""
        question = self._question
        smallest = least_memory_layouts(question, block)
        least = price_memory(question, smallest).peak_device_bytes.reshape(-1, 3).min(axis=1)
        may_fit = least <= question.memory_budget_bytes
        layouts = expand(question, filter_rows(block, may_fit))
        self._num_considered += len(layouts) + 3 * int((~may_fit).sum())
        if not may_fit.all():
            too_large = smallest.take(np.repeat(~may_fit, 3))
            self._least_memory_bound = self._smaller(self._least_memory_bound, too_large)
        self._some_mesh_fits = self._some_mesh_fits or bool(may_fit.any())
        return layouts

    def _smaller(self, known: Priced | None, layouts: Layouts) -> Priced:
        priced = price(self._question, layouts)
        row = priced.take([int(priced.device_bytes.argmin())])
        return row if known is None or row.device_bytes[0] < known.device_bytes[0] else known

    def result(self) -> SearchResult:
        """Everything that was kept, the best first."""
        fitting = concatenate(self._parts) if self._parts else price(self._question, _no_layouts())
        order = np.argsort(fitting.score(self._question.objective), kind="stable")[:MAX_KEPT]
        # A mesh could fit and yet has no layout: the pins contradict each other, and no bytes explain it.
        bound = None if self._some_mesh_fits else self._least_memory_bound
        return SearchResult(
            fitting.take(order), self._num_considered, self._num_fitting, self._least_memory or bound
        )


def _no_layouts() -> Layouts:
    return Layouts(**{f.name: np.zeros(0, np.int64) for f in fields(Layouts)})


def concatenate(parts: list[Priced]) -> Priced:
    """The rows of several tables in one."""
    names = list(vars(parts[0].layouts))
    columns = {name: np.concatenate([getattr(part.layouts, name) for part in parts]) for name in names}
    return Priced(
        Layouts(**columns),
        np.concatenate([part.device_bytes for part in parts]),
        np.concatenate([part.step_seconds for part in parts]),
    )


def best_of_groups(priced: Priced, objective: Objective) -> Priced:
    """The best, the fastest and the smallest layout of each group with equal GROUP_COLUMNS."""
    keys = np.stack([getattr(priced.layouts, name) for name in GROUP_COLUMNS], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    rows: list[NDArray[np.intp]] = []
    for score in (priced.score(objective), priced.step_seconds, priced.device_bytes):
        order = np.lexsort((score, inverse.ravel()))
        _, first = np.unique(inverse.ravel()[order], return_index=True)
        rows.append(order[first])
    return priced.take(np.unique(np.concatenate(rows)))
