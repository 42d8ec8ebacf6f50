"""Gradient buckets: gradients that one collective reduces together."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.ops.collectives import all_gather_single, reduce_scatter_single
from meshwright.parallel.shards import ParameterShard
from meshwright.spec.placement import is_routed_expert


class Bucket:
    """Parameters whose gradients are reduced in one collective over the same axes."""

    def __init__(self, shards: list[ParameterShard], mesh: Mesh) -> None:
        self.shards = shards
        self.scatter, self.sums = _reduction_groups(shards[0], mesh)
        self.num_rows = self.scatter.size() if self.scatter else 1
        self.pending: set[int] = set()
        """Parameters, by id, whose gradients this backward has not produced yet."""
        self._buffer: Tensor | None = None
        self._work: dist.Work | None = None
        self._total: Tensor | None = None

    @property
    def is_local(self) -> bool:
        """Whether no other rank has a part of these gradients: then they are used as they are."""
        return self.scatter is None and not self.sums

    def launch(self) -> None:
        """Copy the gradients into the bucket, free them, and launch the first reduction."""
        rows = [_padded_rows(local_gradient(one), self.num_rows) for one in self.shards]
        bucket_RC = torch.cat(rows, dim=1)
        for one in self.shards:
            one.parameter.grad = None
        if self.scatter is not None:
            self._buffer = bucket_RC.new_empty(bucket_RC.shape[1])
            self._work = reduce_scatter_single(
                self._buffer, bucket_RC.view(-1), group=self.scatter, async_op=True
            )
        else:  # only after the last micro-batch, so the final sum itself is launched
            self._buffer = bucket_RC.view(-1)
            if self.sums:
                self._work = dist.all_reduce(self._buffer, group=self.sums[0], async_op=True)

    def finish(self, *, is_last: bool) -> None:
        """Wait and accumulate; after the last micro-batch reduce over the other axes and set the shards'
        gradients."""
        assert self._buffer is not None
        if self._work is not None:
            self._work.wait()
        self._total = self._buffer if self._total is None else self._total.add_(self._buffer)
        self._buffer = self._work = None
        if is_last:
            for group in self.sums if self.scatter is not None else self.sums[1:]:
                dist.all_reduce(self._total, group=group)
            self._set_shard_gradients(self._total)
            self._total = None

    def _set_shard_gradients(self, reduced: Tensor) -> None:
        offset = 0
        for one in self.shards:
            one.shard.grad = reduced[offset : offset + one.shard.numel()].view_as(one.shard)
            offset += _chunk_elements(one, self.num_rows)

    def gather_parameters(self) -> None:
        """All-gather the rows of every rank, after the shards were updated."""
        if self.scatter is None:
            return
        mine = torch.cat(
            [_padded_rows(one.shard.detach(), 1, _chunk_elements(one, self.num_rows)) for one in self.shards],
            dim=1,
        )
        gathered_RC = mine.new_empty(self.num_rows, mine.shape[1])
        all_gather_single(gathered_RC.view(-1), mine.view(-1), group=self.scatter)
        offset = 0
        for one in self.shards:
            width = _chunk_elements(one, self.num_rows)
            full = _local_tensor(one.parameter)
            rows = gathered_RC[:, offset : offset + width].reshape(-1)[: full.numel()]
            full.copy_(rows.view_as(full))
            offset += width


def _local_tensor(parameter: nn.Parameter) -> Tensor:
    """The tp-local tensor that the model computes with."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def local_gradient(one: ParameterShard) -> Tensor:
    """This rank's gradient; zeros when nothing on this rank used the parameter."""
    gradient = one.parameter.grad
    if gradient is None:
        return torch.zeros_like(_local_tensor(one.parameter), dtype=one.shard.grad_dtype)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _chunk_elements(one: ParameterShard, num_rows: int) -> int:
    """Elements of one (padded) row chunk of a parameter."""
    full = torch.atleast_1d(_local_tensor(one.parameter))
    return -(-full.shape[0] // num_rows) * (full.numel() // max(1, full.shape[0]))


def _padded_rows(tensor: Tensor, num_rows: int, width: int | None = None) -> Tensor:
    """[rows of dim 0, ...] -> [num_rows, chunk], zeros where dim 0 does not divide."""
    tensor = torch.atleast_1d(tensor)
    if width is None:
        per_row = tensor.numel() // max(1, tensor.shape[0])
        width = -(-tensor.shape[0] // num_rows) * per_row
    missing = num_rows * width - tensor.numel()
    flat = tensor.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    return padded.view(num_rows, width)


def _reduction_groups(
    one: ParameterShard, mesh: Mesh
) -> tuple[dist.ProcessGroup | None, list[dist.ProcessGroup]]:
    """(group to reduce-scatter over, groups to all-reduce over) for the gradient of one parameter."""
    on_experts = is_routed_expert(one.name) and mesh.parallel.ep > 1
    axes, shard_axis = (mesh.expert, "expert_shard") if on_experts else (mesh.dense, "shard")
    sums = [mesh.dense.get_group("tp")] if is_partial_over_tp(one, mesh) else []
    if (mesh.parallel.zero == 0 or one.shard.ndim == 0) and not on_experts:
        return None, ([mesh.data.get_group("data")] if mesh.data["data"].size() > 1 else []) + sums
    if axes["dp_replicate"].size() > 1:
        sums.insert(0, axes.get_group("dp_replicate"))
    if mesh.parallel.zero == 0:
        extra = [axes.get_group(shard_axis)] if axes[shard_axis].size() > 1 else []
        return None, extra + sums
    return axes.get_group(shard_axis), sums


def is_partial_over_tp(one: ParameterShard, mesh: Mesh) -> bool:
    """Whether each tp rank has a partial gradient: so it is for parameters that tp replicates.

    A parameter that is not on the tp axis at all (in user modules) has its full gradient on every rank.
    """
    names = one.mesh.mesh_dim_names or ()
    if mesh.parallel.tp == 1 or "tp" not in names:
        return False
    return one.placements[names.index("tp")].is_replicate()
