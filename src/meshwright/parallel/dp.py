"""Data parallel: every rank computes the gradient of its own tokens; the sum of all is the gradient.

    dW[D, F] = sum over ranks r of dW_r[D, F]          the loss has divided already, so nothing divides here

ZeRO-0  all-reduce of gradients once per step                       2 x P elements per rank
ZeRO-1  reduce-scatter once per step, all-gather after the update   2 x P
ZeRO-2  the same, reduce-scatter after every micro-batch            (1 + micro-batches) x P
ZeRO-3  FSDP2: parameters gathered for forward and again for        3 x P, overlapped
        backward, gradients reduce-scattered; see `shard_fully`
With `reduce=last` stages 2 and 3 keep whole gradients and scatter once, after the last micro-batch.

Stages 0 to 2 are one mechanism: gradients are laid into flat buckets of [shards, chunk], the bucket is
reduced over the axes that hold other tokens, and rank k keeps row k. With ZeRO-0 there is one row.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from meshwright.mesh import Mesh
from meshwright.ops.collectives import all_gather_single, reduce_scatter_single
from meshwright.parallel.shards import ParameterShard
from meshwright.spec.placement import is_routed_expert

BUCKET_ELEMENTS = 25_000_000  # 100 MB of fp32: large enough for full bandwidth, small enough to overlap


class Bucket:
    """Parameters whose gradients are reduced together over the same axes."""

    def __init__(self, shards: list[ParameterShard], mesh: Mesh) -> None:
        self.shards = shards
        self.scatter, self.sums = _reduction_groups(shards[0], mesh)
        self.num_rows = self.scatter.size() if self.scatter else 1
        self.waiting: set[int] = set()
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._total: Tensor | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part of these gradients: then they are used where they are."""
        return self.scatter is None and not self.sums

    def launch(self) -> None:
        """Lay the gradients into the flat buffer, free them, and start the first reduction."""
        rows = [_padded_rows(_local_gradient(one), self.num_rows) for one in self.shards]
        flat_RC = torch.cat(rows, dim=1)
        for one in self.shards:
            one.parameter.grad = None
        if self.scatter is not None:
            self._flat = flat_RC.new_empty(flat_RC.shape[1])
            self._work = reduce_scatter_single(
                self._flat, flat_RC.view(-1), group=self.scatter, async_op=True
            )
        else:  # not before the last micro-batch, so the sum itself can start
            self._flat = flat_RC.view(-1)
            self._work = dist.all_reduce(self._flat, group=self.sums[0], async_op=True) if self.sums else None

    def finish(self, *, is_last: bool) -> None:
        """Wait and add up; after the last micro-batch sum over the remaining axes and serve the shards."""
        assert self._flat is not None
        if self._work is not None:
            self._work.wait()
        self._total = self._flat if self._total is None else self._total.add_(self._flat)
        self._flat = self._work = None
        if is_last:
            for group in self.sums if self.scatter is not None else self.sums[1:]:
                dist.all_reduce(self._total, group=group)
            self._serve_shards(self._total)
            self._total = None

    def _serve_shards(self, flat: Tensor) -> None:
        offset = 0
        for one in self.shards:
            one.shard.grad = flat[offset : offset + one.shard.numel()].view_as(one.shard)
            offset += _chunk_elements(one, self.num_rows)

    def gather_parameters(self) -> None:
        """After an update of the shards: every rank's rows to every rank."""
        if self.scatter is None:
            return
        mine = torch.cat(
            [_padded_rows(one.shard.detach(), 1, _chunk_elements(one, self.num_rows)) for one in self.shards],
            dim=1,
        )
        everyone_RC = mine.new_empty(self.num_rows, mine.shape[1])
        all_gather_single(everyone_RC.view(-1), mine.view(-1), group=self.scatter)
        offset = 0
        for one in self.shards:
            width = _chunk_elements(one, self.num_rows)
            whole = _whole(one.parameter)
            rows = everyone_RC[:, offset : offset + width].reshape(-1)[: whole.numel()]
            whole.copy_(rows.view_as(whole))
            offset += width


def _whole(parameter: nn.Parameter) -> Tensor:
    """The tp-local tensor the model computes with."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _local_gradient(one: ParameterShard) -> Tensor:
    """This rank's gradient; zeros when nothing on this rank touched the parameter."""
    gradient = one.parameter.grad
    if gradient is None:
        return torch.zeros_like(_whole(one.parameter), dtype=one.shard.grad_dtype)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _chunk_elements(one: ParameterShard, num_rows: int) -> int:
    """Elements of one (padded) chunk of rows of a parameter."""
    whole = torch.atleast_1d(_whole(one.parameter))
    return -(-whole.shape[0] // num_rows) * (whole.numel() // max(1, whole.shape[0]))


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
    """(group to scatter over, groups to sum over) for the gradient of one parameter."""
    on_experts = is_routed_expert(one.name) and mesh.parallel.ep > 1
    axes, shard_axis = (mesh.expert, "expert_shard") if on_experts else (mesh.dense, "shard")
    sums = [mesh.dense.get_group("tp")] if _is_partial_over_tp(one, mesh) else []
    if (mesh.parallel.zero == 0 or one.shard.ndim == 0) and not on_experts:
        return None, ([mesh.data.get_group("data")] if mesh.data["data"].size() > 1 else []) + sums
    if axes["dp_replicate"].size() > 1:
        sums.insert(0, axes.get_group("dp_replicate"))
    if mesh.parallel.zero == 0:
        extra = [axes.get_group(shard_axis)] if axes[shard_axis].size() > 1 else []
        return None, extra + sums
    return axes.get_group(shard_axis), sums


def _is_partial_over_tp(one: ParameterShard, mesh: Mesh) -> bool:
    """A parameter that tp does not cut gets a part of its gradient on each tp rank.

    One that does not lie on the tp axis at all (in modules that are not ours) has its whole gradient there.
    """
    names = one.mesh.mesh_dim_names or ()
    if mesh.parallel.tp == 1 or "tp" not in names:
        return False
    return one.placements[names.index("tp")].is_replicate()


class GradientReducer:
    """Stages 0 to 2: sums gradients over the mesh, overlapping the last backward where it can."""

    def __init__(self, shards: list[ParameterShard], mesh: Mesh, roots: Sequence[nn.Module]) -> None:
        self.reduces_each_microbatch = mesh.parallel.zero == 2 and mesh.parallel.reduce == "each"
        root_of = {id(one): number for number, root in enumerate(roots) for one in root.parameters()}
        trainable = [one for one in shards if one.parameter.requires_grad]
        # Backward finds the last layers first, so buckets are filled and launched from the end.
        # A stage that is reduced by itself has buckets of its own.
        apart = root_of if self.reduces_each_microbatch else dict.fromkeys(root_of, 0)
        buckets = [Bucket(part, mesh) for part in _bucketed(trainable[::-1], mesh, apart)]
        self.buckets = [bucket for bucket in buckets if not bucket.is_alone]
        self._alone = [one for bucket in buckets if bucket.is_alone for one in bucket.shards]
        self._bucket_of = {id(one.parameter): bucket for bucket in self.buckets for one in bucket.shards}
        self._by_root = {
            id(root): [one for one in self.buckets if apart[id(one.shards[0].parameter)] == number]
            for number, root in enumerate(roots)
        }
        self._due: list[Bucket] = []
        """Of the backward that runs: launched in this order, each as soon as it is full."""
        self._next = 0
        self._is_last = True
        self._left: list[Bucket] = []
        """Not yet reduced for the last time in this step."""
        # A parameter must not keep the reducer that has it: Python does not see autograd's half of that ring.
        ready = partial(_tell, weakref.WeakMethod(self._gradient_ready))
        for bucket in self.buckets:
            for one in bucket.shards:
                one.parameter.register_post_accumulate_grad_hook(ready)

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Entered around the backward of one micro-batch; on leaving, what is due has been reduced."""
        is_due = is_last or self.reduces_each_microbatch
        self._begin(self.buckets if is_due else [], is_last=is_last)
        yield
        self._end()
        if is_last:
            self._serve_alone()

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Entered around a pipeline's schedule, which runs all micro-batches of a step."""
        self._left = list(self.buckets)
        self._begin([], is_last=False)
        yield
        self._end()
        self._begin(self._left, is_last=True)
        self._end()
        self._serve_alone()

    def begin_backward(self, root: nn.Module, *, is_last: bool) -> None:
        """Inside a schedule: a micro-batch's backward begins on a stage. Only where `reduces_each_microbatch`."""
        self._end()
        self._begin(self._by_root[id(root)], is_last=is_last)

    def _begin(self, due: list[Bucket], *, is_last: bool) -> None:
        self._due, self._next, self._is_last = list(due), 0, is_last
        for bucket in self._due:
            bucket.waiting = {id(one.parameter) for one in bucket.shards}

    def _end(self) -> None:
        """Launch what never became full, and wait for all."""
        for bucket in self._due[self._next :]:
            bucket.launch()
        for bucket in self._due:
            bucket.finish(is_last=self._is_last)
        if self._is_last:
            self._left = [bucket for bucket in self._left if bucket not in self._due]
        self._due = []

    def _serve_alone(self) -> None:
        for one in self._alone:
            one.shard.grad, one.parameter.grad = _local_gradient(one), None

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Launch every bucket that is full, in the one order that all ranks share."""
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        while self._next < len(self._due) and not self._due[self._next].waiting:
            self._due[self._next].launch()
            self._next += 1

    def gather_parameters(self) -> None:
        """After the optimizer's update."""
        for bucket in self.buckets:
            bucket.gather_parameters()


def _tell(method: weakref.WeakMethod[Callable[[Tensor], None]], parameter: Tensor) -> None:
    """Call a method of something that may be gone."""
    found = method()
    if found is not None:
        found(parameter)


def _bucketed(
    shards: list[ParameterShard], mesh: Mesh, apart: Mapping[int, int]
) -> Iterator[list[ParameterShard]]:
    """Runs of parameters with the same reduction, dtype and number in `apart`, cut at BUCKET_ELEMENTS."""

    def kind(one: ParameterShard) -> tuple[int, bool, bool, bool, torch.dtype]:
        return (
            apart[id(one.parameter)],
            one.shard.ndim == 0,
            is_routed_expert(one.name) and mesh.parallel.ep > 1,
            _is_partial_over_tp(one, mesh),
            one.shard.dtype,
        )

    for _, run in groupby(sorted(shards, key=lambda one: repr(kind(one))), key=kind):
        bucket: list[ParameterShard] = []
        for one in run:
            bucket.append(one)
            if sum(member.parameter.numel() for member in bucket) >= BUCKET_ELEMENTS:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


class FullyShardedReducer:
    """Stage 3: FSDP2 reduces by itself; what remains is to show each shard its gradient."""

    def __init__(
        self, shards: list[ParameterShard], roots: Sequence[nn.Module], *, every_microbatch: bool
    ) -> None:
        self.reduces_each_microbatch = every_microbatch
        self._trainable = [one for one in shards if one.parameter.requires_grad]
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Scattered gradients are added up; replicas are summed once, after the last micro-batch."""
        for root in self._roots:
            _synchronise(root, now=is_last or self.reduces_each_microbatch, replicas=is_last)
        yield
        self._take(is_last=is_last)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Entered around a pipeline's schedule, whose last act lets FSDP2 reduce what is still whole."""
        yield
        self._take(is_last=True)

    def begin_backward(self, root: nn.Module, *, is_last: bool) -> None:
        """Inside a schedule: a micro-batch's backward begins on a stage. Only where `reduces_each_microbatch`.

        Torch's stages have just told FSDP2 to keep gradients whole, and not to wait for anything.
        """
        assert isinstance(root, FSDPModule)
        self._take(is_last=False)  # of the micro-batch before, in which FSDP2 would go on adding in 16 bits
        root.set_is_last_backward(True)
        _synchronise(root, now=True, replicas=is_last)

    def _take(self, *, is_last: bool) -> None:
        for one in self._trainable:
            _take_gradient(one)
            if is_last and one.shard.grad is None:
                one.shard.grad = torch.zeros_like(one.shard, dtype=one.shard.grad_dtype)

    def gather_parameters(self) -> None:
        """Nothing: the next forward gathers."""


def _synchronise(root: FSDPModule, *, now: bool, replicas: bool) -> None:
    """Whether the next backward scatters gradients, and sums those of replicas."""
    root.set_requires_gradient_sync(now)  # first: it also says yes or no to the all-reduce
    root.set_requires_all_reduce(replicas)


def _take_gradient(one: ParameterShard) -> None:
    """Add what FSDP2 left to the shard's gradient, which may be wider."""
    gradient, one.parameter.grad = one.parameter.grad, None
    if isinstance(gradient, DTensor):
        local = gradient.to_local().to(one.shard.grad_dtype)
        one.shard.grad = local if one.shard.grad is None else one.shard.grad.add_(local)


Reducer = GradientReducer | FullyShardedReducer


def build_reducer(shards: list[ParameterShard], mesh: Mesh, *, roots: Sequence[nn.Module]) -> Reducer:
    """The reducer of the mesh's ZeRO stage; `roots` are the models of this rank."""
    if mesh.parallel.zero == 3:
        return FullyShardedReducer(shards, roots, every_microbatch=mesh.parallel.reduce == "each")
    return GradientReducer(shards, mesh, roots)


def shard_fully(
    units: list[nn.Module],
    root: nn.Module,
    mesh: Mesh,
    *,
    experts: list[nn.Module],
    lower: torch.dtype | None,
    gradients: torch.dtype,
    on_host: bool = False,
) -> None:
    """ZeRO-3 over shard (and replicas over dp_replicate): each unit is gathered when it is used.

    A pipeline keeps parameters gathered during a step: gathering them anew for every micro-batch of
    every stage would cost pp times the traffic. `on_host`: shards and their gradients live in host memory,
    and only what is gathered is on the device.
    """
    parallel = mesh.parallel
    # Inputs are left alone: loss weights and rotary tables stay fp32; autocast lowers what should be lower.
    policy = MixedPrecisionPolicy(
        param_dtype=lower, reduce_dtype=gradients if lower else None, cast_forward_inputs=False
    )
    home = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if on_host else OffloadPolicy()
    shard = partial(
        fully_shard, mp_policy=policy, offload_policy=home, reshard_after_forward=parallel.pp == 1
    )
    if parallel.ep > 1:
        expert_mesh = _sharding_mesh(mesh.expert, "expert_shard", parallel.dp_replicate)
        for module in experts:
            shard(module, mesh=expert_mesh)
    dense_mesh = _sharding_mesh(mesh.dense, "shard", parallel.dp_replicate)
    for module in [*units, root]:
        shard(module, mesh=dense_mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss has divided by the global token count: sum, never average. A factor other than the
            # group size would ask for PREMUL_SUM, which gloo lacks and NCCL gets wrong for bf16.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _sharding_mesh(axes, shard_axis: str, dp_replicate: int):
    return axes[("dp_replicate", shard_axis)] if dp_replicate > 1 else axes[shard_axis]
