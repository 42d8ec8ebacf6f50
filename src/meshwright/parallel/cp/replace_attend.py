"""Replaces each block's `attend` with the attention of a cp kind."""

from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.errors import MeshError
from meshwright.models.layers.attend import Attend
from meshwright.parallel.cp.gather import GatherAttend
from meshwright.parallel.cp.ring import RingAttend
from meshwright.parallel.cp.ulysses import UlyssesAttend
from meshwright.spec.parallel import CpKind


class CpGroups(NamedTuple):
    """The cp axis as one group, and split in two levels for `hierarchical`."""

    full: ProcessGroup
    """All ranks of the axis."""
    inner: ProcessGroup | None = None
    """Neighbours of this rank that exchange heads."""
    outer: ProcessGroup | None = None
    """The ranks at the same position of each inner group: the ring."""


def cp_groups(group: ProcessGroup, cp_inner: int = 1) -> CpGroups:
    """The axis, split in two levels when cp_inner > 1; then it communicates, and all its ranks call it."""
    cp = group.size()
    if cp % cp_inner:
        raise MeshError(
            f"cp_inner={cp_inner} does not divide cp={cp}",
            where="parallel.cp_inner",
            hint="choose a divisor of cp, usually the ranks of cp on one node",
        )
    if cp_inner == 1:
        return CpGroups(full=group)
    ranks = dist.get_process_group_ranks(group)
    first = group.rank() // cp_inner * cp_inner
    inner_ranks = ranks[first : first + cp_inner]
    outer_ranks = ranks[group.rank() % cp_inner :: cp_inner]
    return CpGroups(full=group, inner=_new_group(inner_ranks), outer=_new_group(outer_ranks))


def _new_group(ranks: list[int]) -> ProcessGroup:
    """A new group; only its members synchronise, since other parts of the mesh make theirs at other times."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def apply_cp(model: nn.Module, groups: CpGroups, kind: CpKind, stripes: int = 1) -> int:
    """Replace every `Attend` of the model and return how many there are. Does not communicate.

    `stripes` are those of the micro-batches (zigzag.py); only `gather` has more than one.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Attend)
    ]
    for parent, name, attend in found:
        setattr(parent, name, build_attend(groups, kind, attend, stripes))
    return len(found)


def build_attend(groups: CpGroups, kind: CpKind, attend: Attend, stripes: int = 1) -> nn.Module:
    """The attention of one cp kind; `attend` is that of a single device."""
    if attend.dropout and kind != "ulysses":
        raise MeshError(
            f"attention dropout {attend.dropout} with cp_kind={kind}, whose kernels have none",
            where="parallel.cp_kind",
            hint="set model.attention.dropout=0, or use cp_kind=ulysses",
        )
    if kind == "gather":
        return GatherAttend(groups.full, attend.simulated, stripes)
    if kind == "ring":
        return RingAttend(groups.full, attend.simulated)
    if kind == "ulysses":
        return UlyssesAttend(groups.full, attend)
    if groups.inner is None or groups.outer is None:
        raise MeshError(
            "cp_kind=hierarchical with cp_inner=1 exchanges no heads",
            where="parallel.cp_inner",
            hint="set cp_inner to the ranks of cp on one node, or use cp_kind=ring",
        )
    return UlyssesAttend(groups.inner, RingAttend(groups.outer, attend.simulated))
