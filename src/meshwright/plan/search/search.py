"""Prices every layout of a question and keeps the ones that an answer needs.

The search is exhaustive and has two passes. The first prices the layouts that keep everything on the device.
The second prices what saves memory (offload to the host, short shards of context parallel) wherever the same
layout without recompute would be faster than the best so far. So a layout that saves memory competes with all
others, and costs no search where it cannot win. For the fastest plan the largest worlds are priced first, and
smaller ones are skipped once even a device at its best matmul rate could not make them faster.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.search.collector import KEPT_WITHIN, Collector
from meshwright.plan.search.meshes import Table, filter_rows, meshes
from meshwright.plan.search.question import (
    MIN_CP_POSITIONS_TO_SAVE,
    Priced,
    Question,
    memory_use,
    price_memory,
    price_time,
)
from meshwright.plan.search.space import MAX_MICROBATCH_TOKENS, least_memory_layouts
from meshwright.plan.workload.layouts import Floats, Ints, Layouts

TIE_FRACTION = 0.05
"""Plans this close are equally fast, because the prediction is less exact. The simplest of them is chosen."""
BLOCK_MESHES, BATCH_BLOCKS = 128, 32
SHARDING_COLUMNS = ("tp", "cp", "ep", "etp", "ep_overlap", "cp_kind", "cp_inner", "cp_stripes")
KERNEL_ITEMS = ("matmul", "attention", "elementwise", "head")
LEAST_SHARE = 0.9
"""Partial waves of tiles make some smaller micro-batches a little more efficient than the largest."""
NEAR_BEST = 1.1
"""`within` where only the best layout is asked for: beyond it no simulation changes which one it is."""


@dataclass(frozen=True)
class SearchResult:
    """What the search kept: the best layouts of every group, and the closest one where none fits."""

    fitting: Priced
    num_considered: int
    num_fitting: int
    """Layouts that fit, of those that are not much slower than the best."""
    closest: Priced | None
    """The layout that comes closest where none fits; None where the pins leave no layout at all."""


def search(question: Question, *, ranks: range | None = None, within: float = KEPT_WITHIN) -> SearchResult:
    """Price every layout on at most the cluster's devices, or with a world size in `ranks`.

    `within`: layouts that are slower than the best by more than this factor are not kept.
    """
    sizes = ranks or range(1, question.cluster.num_devices + 1)
    collector = Collector(question, within=within)
    for batch, bound in _batches(question, sizes):
        ahead = (bound <= within * collector.best_score) & _may_improve(collector, batch)
        collector.look_ahead(filter_rows(batch, ahead), savers=False)
        for block, least in _blocks(batch, bound):
            if not _may_improve(collector, block).any():
                break
            collector.add(filter_rows(block, least <= within * collector.best_score))
    # With --objective memory, a saver would always win: it is for what does not fit otherwise.
    if question.objective != "memory" or not np.isfinite(collector.best_score):
        for batch, bound in _batches(replace(question, min_cp_positions=_shortest_cp(question)), sizes):
            ahead = (bound <= collector.saver_limit) & _may_improve(collector, batch)
            collector.look_ahead(filter_rows(batch, ahead), savers=True)
            for block, least in _blocks(batch, bound):
                if not _may_improve(collector, block).any():
                    break
                collector.add_savers(filter_rows(block, least <= collector.saver_limit))
    return _result(collector)


def search_meshes(question: Question, mesh_table: Table, *, below: float = np.inf) -> SearchResult:
    """Price the layouts on these meshes whose score is at most `below`."""
    collector = Collector(question, within=NEAR_BEST, below=below)
    collector.add(mesh_table)
    collector.add_savers(mesh_table)
    return _result(collector)


def _result(collector: Collector) -> SearchResult:
    fitting, closest = collector.result()
    return SearchResult(fitting, collector.num_considered, collector.num_fitting, closest)


def _shortest_cp(question: Question) -> int:
    return min(question.min_cp_positions, MIN_CP_POSITIONS_TO_SAVE)


def lower_bound_seconds(question: Question, num_ranks: int) -> float:
    """No step on this many devices is faster: every model FLOP at the best matmul rate ever measured."""
    return float(_lower_bounds(question, np.array([num_ranks]))[0])


def _lower_bounds(question: Question, num_ranks: Ints) -> Floats:
    workload, data = question.workload, question.run.data
    flops = workload.model_flops_per_token * data.batch_sequences * data.sequence_length
    rate = question.cluster.device.matmul_ceiling(workload.matmul_rate)
    return flops / (num_ranks.astype(np.float64) * rate)


def least_memory_use(question: Question) -> float:
    """The least part of the usable memory that a layout needs, also with offload."""
    wide = replace(question, min_cp_positions=_shortest_cp(question))
    table = meshes(wide, range(1, question.cluster.num_devices + 1))
    if len(table["tp"]) == 0:
        return float("inf")
    least = np.inf
    for offloads in dict.fromkeys((False, question.may_offload)):
        needed = price_memory(question, least_memory_layouts(question, table, offloads=offloads))
        least = min(least, float(memory_use(question, needed).min()))
    return least


def _may_improve(collector: Collector, meshes: Table) -> NDArray[np.bool_]:
    """Whether a world of the size of each mesh could be faster than the best so far."""
    bound = _lower_bounds(collector.question, meshes["num_ranks"])
    return (bound <= collector.saver_limit) | (collector.question.objective != "speed")


def _batches(question: Question, ranks: range) -> Iterator[tuple[Table, Floats]]:
    """The meshes in batches of 1, 2, 4 ... blocks, the largest worlds first, with the least score of each."""
    table = _fastest_cp_kinds(question, meshes(question, ranks))
    least = _least_scores(question, table)
    order = np.argsort(-table["num_ranks"], kind="stable")
    first, num_blocks = 0, 1
    while first < len(order):
        rows = order[first : first + num_blocks * BLOCK_MESHES]
        yield {name: column[rows] for name, column in table.items()}, least[rows]
        first, num_blocks = first + len(rows), min(2 * num_blocks, BATCH_BLOCKS)


def _blocks(batch: Table, least: Floats) -> Iterator[tuple[Table, Floats]]:
    """A batch in blocks: what fits in one bounds the next."""
    for first in range(0, len(least), BLOCK_MESHES):
        rows = slice(first, first + BLOCK_MESHES)
        yield {name: column[rows] for name, column in batch.items()}, least[rows]


def _least_scores(question: Question, table: Table) -> Floats:
    """A lower bound of the score on each mesh: its kernels alone, in the largest micro-batches."""
    if len(table["tp"]) == 0 or question.objective == "memory":
        return np.zeros(len(table["tp"]))
    data = question.run.data
    longest = np.maximum(MAX_MICROBATCH_TOKENS // (data.sequence_length // table["cp"]), 1)
    size = np.minimum(np.maximum(data.batch_sequences // table["dp"], 1), longest)
    columns = {name: table[name] for name in SHARDING_COLUMNS}
    rows = np.stack([*columns.values(), size], axis=1)
    distinct, index = np.unique(rows, axis=0, return_inverse=True)
    probes = _probe_columns(dict(zip(columns, distinct.T, strict=False)))
    layouts = Layouts(**{**probes, "microbatch_sequences": distinct[:, -1]})
    items = price_time(question, layouts).items
    seconds = sum((items[name] for name in KERNEL_ITEMS), np.zeros(len(layouts)))
    device_seconds = seconds * layouts.num_ranks * data.batch_sequences / layouts.batch_sequences
    least = LEAST_SHARE * device_seconds[index.ravel()]
    return least if question.objective == "cost" else least / table["num_ranks"]


def _fastest_cp_kinds(question: Question, table: Table) -> Table:
    """The fastest kind of context parallel for each model sharding: pp, dp and batch do not change which."""
    if len(table["cp"]) == 0 or int(table["cp"].max()) == 1 or "cp_kind" in question.pins.allowed:
        return table
    columns = SHARDING_COLUMNS
    rows = np.stack([table[name] for name in columns], axis=1)
    distinct, index = np.unique(rows, axis=0, return_inverse=True)
    probes = Layouts(**_probe_columns(dict(zip(columns, distinct.T, strict=True))))
    seconds = price_time(question, probes).step_seconds
    fastest: dict[tuple[int, ...], tuple[float, int]] = {}
    for row, sharding in enumerate(distinct):
        key = tuple(int(value) for value in sharding[:5])
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
