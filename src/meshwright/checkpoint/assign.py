"""Which rank writes which box of which tensor, so that each element is written once and the work is even."""

import zlib
from collections import defaultdict
from collections.abc import Mapping

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


def assign_boxes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, IndexEntry]]:
    """The local tensors that this rank writes, and the index of all ranks. All ranks call it; communicates.

    Of the ranks that hold the same box one writes it; a hash of the name chooses, so that all get their part.
    """
    boxes = _boxes_of(tensors)
    gathered: list[_LocalBoxes] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, boxes)
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, found in enumerate(gathered):
        for name, (_, _, start, _) in found.items():
            holders[name, start].append(rank)
    mine: dict[str, Tensor] = {}
    entries: dict[str, IndexEntry] = {}
    for (name, start), ranks in sorted(holders.items()):
        writer = ranks[zlib.crc32(name.encode()) % len(ranks)]
        dtype, full, _, shape = gathered[writer][name]
        before = entries[name].boxes if name in entries else ()
        entries[name] = IndexEntry(dtype, full, (*before, Box(shard_file_name(writer), start, shape)))
        if writer == dist.get_rank():
            mine[name] = local_box(tensors[name])[0]
    return mine, entries


def _boxes_of(tensors: Mapping[str, Tensor]) -> _LocalBoxes:
    found: _LocalBoxes = {}
    for name, tensor in tensors.items():
        local, slices = local_box(tensor)
        if local.numel():  # the last ranks of an uneven shard have no rows
            start = tuple(part.start for part in slices)
            found[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, tuple(local.shape))
    return found
