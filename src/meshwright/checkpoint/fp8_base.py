"""Weights of a Hugging Face folder that are stored in fp8 while they are read (`adapter.base=fp8`)."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.models.initialise import stored_weights
from meshwright.parallel.shards import ParameterShard, global_slices
from meshwright.precision.fp8.stored import encode_stored, stored_scale


def load_fp8(
    reader: HuggingFaceReader, stages: Sequence[nn.Module], shards: Mapping[str, ParameterShard]
) -> set[str]:
    """Load the weights of these stages that are stored in fp8, and return their names.

    All ranks call it. A rank reads its shards, linear by linear; the amax of linears that share a scale is
    all-reduced (MAX) over the ranks that shard them, so any mesh has the same bytes.
    """
    failure: MeshwrightError | None = None
    groups = [group for stage in stages for group in stored_weights(stage)]
    for scale, names in groups:
        parts = [shards[name] for name in names]
        try:
            values = [reader.read_slice(one.name, global_slices(one)).to(one.shard.device) for one in parts]
        except MeshwrightError as error:  # raised at the end: the other ranks wait in the all-reduce
            failure, values = error, [torch.zeros(one.shard.shape, device=one.shard.device) for one in parts]
        amax = _amax(values, parts[0])
        scale.value.copy_(stored_scale(amax))
        for one, value in zip(parts, values, strict=True):
            one.shard.copy_(encode_stored(value, scale.value))
    if failure is not None:
        raise failure
    return {name for _, names in groups for name in names}


def _amax(values: Sequence[Tensor], shard: ParameterShard) -> Tensor:
    """The largest magnitude of full weights, of which this rank holds shards that may be empty."""
    maxima = [value.abs().amax().float() if value.numel() else torch.zeros(()) for value in values]
    amax = torch.stack([one.to(shard.shard.device) for one in maxima]).amax()
    for axis, placement in enumerate(shard.placements):
        if not placement.is_replicate() and shard.mesh.size(axis) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=shard.mesh.get_group(axis))
    return amax
