"""Small worlds with the axes of a large one: the degrees that a proof on one machine runs.

A mistake in an axis, or between two axes, shows at the smallest degree: two ranks, four for the two levels of
hierarchical cp, more than two for pipeline stages in the middle.
"""

import math
from collections.abc import Iterable
from itertools import combinations

from meshwright.spec.parallel import MESH_ORDER, ParallelSpec

MAX_RANKS = 8
"""Processes that one machine runs at the same time without trouble."""
# Order in which axes are kept when not all fit: first those that shard the model, last its replicas.
_AXIS_PRIORITY = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
_MIDDLE_STAGES = 4
"""Pipeline ranks at which a stage has neighbours on both sides."""

Degrees = dict[str, int]


def small_world(parallel: ParallelSpec, *, max_ranks: int = MAX_RANKS) -> ParallelSpec:
    """One world of at most `max_ranks` ranks with as many of the axes as fit."""
    return _world(parallel, _fitting_axes(parallel, max_ranks), max_ranks)


def covering_worlds(parallel: ParallelSpec, *, max_ranks: int = MAX_RANKS) -> list[ParallelSpec]:
    """Worlds that together run every axis and every pair of axes; `small_world` is the first."""
    used = _used(parallel)
    worlds = [small_world(parallel, max_ranks=max_ranks)]
    missing = _pairs(used) - _pairs(_fitting_axes(parallel, max_ranks))
    fitting = [axes for axes in _subsets(used) if _num_ranks(parallel, axes) <= max_ranks]
    while missing:
        axes = max(fitting, key=lambda axes: len(missing & _pairs(axes)))
        if not missing & _pairs(axes):
            break  # a pair of axes that needs more ranks than allowed
        missing -= _pairs(axes)
        worlds.append(_world(parallel, axes, max_ranks))
    return worlds


def degree_changes(before: ParallelSpec, after: ParallelSpec) -> list[str]:
    """`dp_shard 64 -> 2` for every degree that changed."""
    names = (*MESH_ORDER, "cp_inner", "virtual_stages", "ep", "etp")
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def _used(parallel: ParallelSpec) -> tuple[str, ...]:
    return tuple(axis for axis in _AXIS_PRIORITY if getattr(parallel, axis) > 1)


def _least(parallel: ParallelSpec, axis: str) -> int:
    return 4 if axis == "cp" and parallel.cp_kind == "hierarchical" else 2


def _num_ranks(parallel: ParallelSpec, axes: Iterable[str]) -> int:
    return math.prod(_least(parallel, axis) for axis in axes)


def _fitting_axes(parallel: ParallelSpec, max_ranks: int) -> tuple[str, ...]:
    fitting: tuple[str, ...] = ()
    for axis in _used(parallel):
        if _num_ranks(parallel, (*fitting, axis)) <= max_ranks:
            fitting = (*fitting, axis)
    return fitting


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [subset for size in range(len(axes), 0, -1) for subset in combinations(axes, size)]


def _pairs(axes: Iterable[str]) -> set[tuple[str, ...]]:
    """Every axis and every pair of axes."""
    listed = tuple(axes)
    return {(axis,) for axis in listed} | set(combinations(listed, 2))


def _world(parallel: ParallelSpec, axes: tuple[str, ...], max_ranks: int) -> ParallelSpec:
    degrees = {axis: _least(parallel, axis) if axis in axes else 1 for axis in MESH_ORDER}
    return _with_degrees(parallel, _grown(parallel, degrees, max_ranks))


def _grown(parallel: ParallelSpec, degrees: Degrees, max_ranks: int) -> Degrees:
    """Use spare ranks for stages in the middle, then for experts whose state dp_shard shards further."""
    wishes: list[tuple[str, int]] = []
    if degrees["pp"] > 1 and parallel.virtual_stages == 1:
        wishes.append(("pp", min(parallel.pp, _MIDDLE_STAGES)))
    if degrees["dp_shard"] > 1 and 1 < parallel.ep < parallel.dp_shard * parallel.cp:
        wishes.append(("dp_shard", min(parallel.dp_shard, 4) // 2 * 2))
    for axis, wanted in wishes:
        grown = {**degrees, axis: wanted}
        if math.prod(grown.values()) <= max_ranks:
            degrees = grown
    return degrees


def _with_degrees(parallel: ParallelSpec, degrees: Degrees) -> ParallelSpec:
    """The layout with these degrees; settings of an axis that is left out go back to their defaults."""
    has_cp, has_pp = degrees["cp"] > 1, degrees["pp"] > 1
    lenders = degrees["dp_shard"] * degrees["cp"]
    ep = _small_ep(parallel, lenders)
    return parallel.with_(
        **degrees,
        zero=parallel.zero if lenders > 1 else 0,
        cp_kind=parallel.cp_kind if has_cp else "gather",
        cp_inner=2 if has_cp and parallel.cp_kind == "hierarchical" else 1,
        schedule=parallel.schedule if has_pp else "1f1b",
        virtual_stages=min(parallel.virtual_stages, 2) if has_pp else 1,
        ep=ep,
        ep_overlap=parallel.ep_overlap if ep > 1 else "none",
        etp=degrees["tp"] if parallel.etp > 1 else 1,
    )


def _small_ep(parallel: ParallelSpec, lenders: int) -> int:
    """All ranks that ep may borrow where the large world borrows all; else the smallest degree above 1."""
    if parallel.ep == 1:
        return 1
    if parallel.ep == parallel.dp_shard * parallel.cp:
        return lenders
    return next((degree for degree in range(2, lenders + 1) if lenders % degree == 0), 1)
