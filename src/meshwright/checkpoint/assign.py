"""Which rank writes which box of which tensor, so that each element is written once and the work is even."""

import zlib
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.index import Box, IndexEntry, shard_file_name
from meshwright.checkpoint.shard_file import DTYPE_NAMES
from meshwright.parallel.shards import dtensor_slices

_LocalBoxes = dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Of one rank, by tensor: dtype, full shape, where its box starts, shape of the box."""


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The elements that this rank has of a tensor, and where they lie in the full one."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), dtensor_slices(tensor)
    return tensor, tuple(slice(0, size) for size in tensor.shape)


class BoxAssignment:
    """Which tensors this rank writes, and the index of all ranks.

    The boxes are exchanged at the first save and again when those of any rank have changed. Every other save
    exchanges one integer.
    """

    def __init__(self) -> None:
        self.index: dict[str, IndexEntry] = {}
        self._names: list[str] = []
        self._boxes: _LocalBoxes | None = None

    def local_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local tensors that this rank writes; `index` is valid afterwards.

        All ranks call it; communicates.
        """
        boxes = _boxes_of(tensors)
        is_changed = torch.tensor([int(boxes != self._boxes)])
        dist.all_reduce(is_changed, op=dist.ReduceOp.MAX)
        if is_changed.item():
            self._names, self.index = _assign(boxes)
            self._boxes = boxes
        return {name: local_box(tensors[name])[0] for name in self._names}


def _assign(boxes: _LocalBoxes) -> tuple[list[str], dict[str, IndexEntry]]:
    """The names that this rank writes, and the index of all ranks. Communicates.

    Of the ranks that hold the same box one writes it; a hash of the name chooses, so that all get their part.
    """
    gathered: list[_LocalBoxes] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, boxes)
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, found in enumerate(gathered):
        for name, (_, _, start, _) in found.items():
            holders[name, start].append(rank)
    names: list[str] = []
    entries: dict[str, IndexEntry] = {}
    for (name, start), ranks in sorted(holders.items()):
        writer = ranks[zlib.crc32(name.encode()) % len(ranks)]
        dtype, full, _, shape = gathered[writer][name]
        before = entries[name].boxes if name in entries else ()
        entries[name] = IndexEntry(dtype, full, (*before, Box(shard_file_name(writer), start, shape)))
        if writer == dist.get_rank():
            names.append(name)
    return names, entries


def _boxes_of(tensors: Mapping[str, Tensor]) -> _LocalBoxes:
    found: _LocalBoxes = {}
    for name, tensor in tensors.items():
        local, slices = local_box(tensor)
        if local.numel():  # the last ranks of an uneven shard have no rows
            start = tuple(part.start for part in slices)
            found[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, tuple(local.shape))
    return found
