"""Weights of a Hugging Face folder that are stored in fp8 or nested NF4 while they are read.

Their scales depend on full matrices, of which a rank reads shards: what a rank lacks is all-reduced.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.models.initialise import nested_weights, stored_weights, unpacked_slices
from meshwright.ops.nf4 import quantise_nf4
from meshwright.ops.nf4_nested import nest_absmax
from meshwright.parallel.shards import ParameterShard, global_slices
from meshwright.precision.fp8.stored import Fp8Scale, encode_stored, stored_scale, weight_amax


def load_fp8(
    reader: HuggingFaceReader, stages: Sequence[nn.Module], shards: Mapping[str, ParameterShard]
) -> set[str]:
    """Load the weights of these stages that are stored in fp8, and return their names.

    All ranks call it. A rank reads its shards, linear by linear; the amax of linears that share a scale, or
    of each expert, is all-reduced (MAX) over the ranks that shard them, so any mesh has the same bytes.
    """
    failure: MeshwrightError | None = None
    groups = [group for stage in stages for group in stored_weights(stage)]
    for scale, names in groups:
        parts = [shards[name] for name in names]
        try:
            values = [reader.read_slice(one.name, global_slices(one)).to(one.shard.device) for one in parts]
        except MeshwrightError as error:  # raised at the end: the other ranks wait in the all-reduce
            failure, values = error, [torch.zeros(one.shard.shape, device=one.shard.device) for one in parts]
        scale.value.copy_(stored_scale(_amax(values, parts, scale)))
        for one, value in zip(parts, values, strict=True):
            one.shard.copy_(encode_stored(value, scale.value[scale.index(global_slices(one)[0])]))
    if failure is not None:
        raise failure
    return {name for _, names in groups for name in names}


def load_nested(
    reader: HuggingFaceReader, stages: Sequence[nn.Module], shards: Mapping[str, ParameterShard]
) -> set[str]:
    """Load the weights of these stages that are stored in nested NF4, and return their names.

    All ranks call it. A rank reads its shards; the absmax of a full matrix, or of those of the experts that
    this rank computes with (1/16 byte per weight), is summed over the ranks that shard it.
    """
    failure: MeshwrightError | None = None
    tables = {name: one for stage in stages for name, one in nested_weights(stage).items()}
    for name, nested in tables.items():
        weight, absmax = shards[name], shards[f"{name}_absmax"]
        rows, *others = global_slices(absmax)
        held = (slice(rows.start - nested.first_expert, rows.stop - nested.first_expert), *others)
        stacked = [nested.num_experts] if len(others) > 1 else []
        full = torch.zeros(*stacked, *absmax.shape[-2:], device=absmax.shard.device)
        try:
            value = reader.read_slice(name, unpacked_slices(global_slices(weight))).to(weight.shard.device)
            packed, bits = quantise_nf4(value)
            weight.shard.copy_(packed)
            full[held] = bits.view(torch.float32)
        except MeshwrightError as error:  # raised at the end: the other ranks wait in the all-reduce
            failure = error
        _all_reduce(full, absmax, dist.ReduceOp.SUM)
        codes, table = nest_absmax(full)
        absmax.shard.copy_(codes[held])
        nested.value.copy_(table)
    if failure is not None:
        raise failure
    return set(tables)


def _amax(values: Sequence[Tensor], parts: Sequence[ParameterShard], scale: Fp8Scale) -> Tensor:
    """The largest magnitude of full weights, or of each expert; this rank's shards may be empty."""
    amax = torch.zeros_like(scale.value)
    for value, one in zip(values, parts, strict=True):
        if value.numel():
            own = amax[scale.index(global_slices(one)[0])]
            own.copy_(torch.maximum(own, weight_amax(value)))
    _all_reduce(amax, parts[0], dist.ReduceOp.MAX)
    return amax


def _all_reduce(tensor: Tensor, shard: ParameterShard, op: dist.ReduceOp.RedOpType) -> None:
    """All-reduce in place over the ranks that shard the matrices of a parameter.

    ep is left out: its ranks have other experts, and so other matrices.
    """
    names = shard.mesh.mesh_dim_names or ()
    for axis, placement in enumerate(shard.placements):
        if not placement.is_replicate() and shard.mesh.size(axis) > 1 and names[axis] != "ep":
            dist.all_reduce(tensor, op=op, group=shard.mesh.get_group(axis))
