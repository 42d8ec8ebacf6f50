"""Data parallel: every rank computes the gradient of its own tokens; the sum over ranks is the gradient.

    dW[D, F] = sum over ranks r of dW_r[D, F]       the loss is divided already, so nothing is divided here

ZeRO-0  all-reduce of gradients once per step                       2 x P elements per rank
ZeRO-1  reduce-scatter once per step, all-gather after the update   2 x P
ZeRO-2  the same, reduce-scatter after every micro-batch            (1 + micro-batches) x P
ZeRO-3  FSDP2: parameters all-gathered for forward and again for    3 x P, overlapped
        backward, gradients reduce-scattered; see `shard_fully`
With `grad_reduce=last_microbatch` stages 2 and 3 keep unsharded gradients and reduce-scatter once, after the
last micro-batch.

Stages 0 to 2 are one mechanism: gradients are copied into buckets of [shards, chunk], each bucket is reduced
over the axes that hold other tokens, and rank k keeps row k. With ZeRO-0 there is one row. A bucket is
launched as soon as backward has filled it, so it is in flight while earlier layers compute. Under ZeRO-3
FSDP2 prefetches: it all-gathers the next block while the current one computes.

Data parallel pays first: it adds no work, and its traffic hides behind compute when a rank has many tokens.
ZeRO stages pay when optimizer states (1), gradients (2) or parameters (3) do not fit.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
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
from meshwright.parallel.fsdp_waits import measure_waits
from meshwright.parallel.gradient_bucket import Bucket, is_partial_over_tp, local_gradient
from meshwright.parallel.gradient_hashes import GradientHashes
from meshwright.parallel.shards import ParameterShard
from meshwright.parallel.torch_frozen_integers import frozen_integers
from meshwright.parallel.wait_clock import WaitClock
from meshwright.plan.memory.buckets import BUCKET_ELEMENTS
from meshwright.spec.placement import is_routed_expert


class GradientReducer:
    """ZeRO stages 0 to 2: reduces gradients over the mesh, overlapped with the last backward."""

    def __init__(self, shards: list[ParameterShard], mesh: Mesh, roots: Sequence[nn.Module]) -> None:
        self.reduces_each_microbatch = (
            mesh.parallel.zero == 2 and mesh.parallel.grad_reduce == "each_microbatch"
        )
        root_of = {id(one): number for number, root in enumerate(roots) for one in root.parameters()}
        trainable = [one for one in shards if one.parameter.requires_grad]
        # Backward reaches the last layers first, so buckets are filled and launched from the end.
        # Pipeline stages that are reduced one by one have buckets of their own.
        group_of = root_of if self.reduces_each_microbatch else dict.fromkeys(root_of, 0)
        # Buckets of experts and of other parameters alternate, each in the place of its last gradient.
        place = {id(one.parameter): place for place, one in enumerate(trainable[::-1])}
        buckets = [Bucket(part, mesh) for part in _bucketed(trainable[::-1], mesh, group_of)]
        buckets.sort(key=lambda bucket: max(place[id(one.parameter)] for one in bucket.shards))
        self.buckets = [bucket for bucket in buckets if not bucket.is_local]
        self._local = [one for bucket in buckets if bucket.is_local for one in bucket.shards]
        self._bucket_of = {id(one.parameter): bucket for bucket in self.buckets for one in bucket.shards}
        self._by_root = {
            id(root): [one for one in self.buckets if group_of[id(one.shards[0].parameter)] == number]
            for number, root in enumerate(roots)
        }
        self._due: list[Bucket] = []
        """Buckets of the current backward: launched in this order, each as soon as it is full."""
        self._next = 0
        self._is_last = True
        self.wait, self.hashes = WaitClock(mesh.device), GradientHashes()
        self._unfinished: list[Bucket] = []
        """Buckets whose last reduction of this step is still to come."""
        # A parameter must not keep its reducer alive: Python does not see autograd's half of that cycle.
        ready = partial(_call_if_alive, weakref.WeakMethod(self._gradient_ready))
        for bucket in self.buckets:
            for one in bucket.shards:
                one.parameter.register_post_accumulate_grad_hook(ready)

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Entered around the backward of one micro-batch; on exit the buckets that were due are reduced."""
        is_due = is_last or self.reduces_each_microbatch
        self._begin(self.buckets if is_due else [], is_last=is_last)
        yield
        self._end()
        if is_last:
            self._setlocal_gradients()

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Entered around a pipeline schedule, which runs all micro-batches of a step."""
        self._unfinished = list(self.buckets)
        self._begin([], is_last=False)
        yield
        self._end()
        self._begin(self._unfinished, is_last=True)
        self._end()
        self._setlocal_gradients()

    def begin_backward(self, root: nn.Module, *, is_last: bool) -> None:
        """Called inside a schedule as a micro-batch's backward begins on a stage.

        Only where `reduces_each_microbatch`.
        """
        self._end()
        self._begin(self._by_root[id(root)], is_last=is_last)

    def _begin(self, due: list[Bucket], *, is_last: bool) -> None:
        self._due, self._next, self._is_last = list(due), 0, is_last
        for bucket in self._due:
            bucket.pending = {id(one.parameter) for one in bucket.shards}

    def _end(self) -> None:
        """Launch the buckets that never became full, and wait for all."""
        for bucket in self._due[self._next :]:
            self._launch(bucket)
        with self.wait.measured():
            for bucket in self._due:
                bucket.finish(is_last=self._is_last)
        if self._is_last:
            self._unfinished = [bucket for bucket in self._unfinished if bucket not in self._due]
        self._due = []

    def _setlocal_gradients(self) -> None:
        for one in self._local:
            one.shard.grad, one.parameter.grad = local_gradient(one), None

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Launch every full bucket, in the one order that all ranks share."""
        self._bucket_of[id(parameter)].pending.discard(id(parameter))
        while self._next < len(self._due) and not self._due[self._next].pending:
            self._launch(self._due[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        self.hashes.add(bucket.shards)
        bucket.launch()

    def gather_parameters(self) -> None:
        """All-gather the updated shards, after the optimizer step."""
        for bucket in self.buckets:
            bucket.gather_parameters()


def _call_if_alive(method: weakref.WeakMethod[Callable[[Tensor], None]], parameter: Tensor) -> None:
    """Call a method of an object that may have been freed."""
    found = method()
    if found is not None:
        found(parameter)


def _bucketed(
    shards: list[ParameterShard], mesh: Mesh, group_of: Mapping[int, int]
) -> Iterator[list[ParameterShard]]:
    """Parameters with the same reduction, dtype and number in `group_of`, in buckets of BUCKET_ELEMENTS."""

    def kind(one: ParameterShard) -> tuple[int, bool, bool, bool, torch.dtype]:
        return (
            group_of[id(one.parameter)],
            one.shard.ndim == 0,
            is_routed_expert(one.name) and mesh.parallel.ep > 1,
            is_partial_over_tp(one, mesh),
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
    """ZeRO-3: FSDP2 reduces by itself; this sets the gradient of each shard from what FSDP2 leaves."""

    def __init__(
        self,
        shards: list[ParameterShard],
        roots: Sequence[nn.Module],
        *,
        every_microbatch: bool,
        wait: WaitClock | None = None,
    ) -> None:
        self.wait = wait
        self.reduces_each_microbatch = every_microbatch
        self.hashes = GradientHashes()  # stays empty: FSDP2 has the gradients before they are reduced
        self._trainable = [one for one in shards if one.parameter.requires_grad]
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Accumulate the shards' gradients; all-reduce over replicas once, after the last micro-batch."""
        for root in self._roots:
            _synchronise(root, now=is_last or self.reduces_each_microbatch, replicas=is_last)
        yield
        self._collect_gradients(is_last=is_last)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Entered around a pipeline schedule, whose last action lets FSDP2 reduce unsharded gradients."""
        yield
        self._collect_gradients(is_last=True)

    def begin_backward(self, root: nn.Module, *, is_last: bool) -> None:
        """Called inside a schedule as a micro-batch's backward begins on a stage.

        Only where `reduces_each_microbatch`. Torch's pipeline stages have just set FSDP2 to keep
        gradients unsharded and to wait for nothing.
        """
        assert isinstance(root, FSDPModule)
        self._collect_gradients(is_last=False)  # or FSDP2 would add the next micro-batch to them in 16 bits
        root.set_is_last_backward(True)
        _synchronise(root, now=True, replicas=is_last)

    def _collect_gradients(self, *, is_last: bool) -> None:
        for one in self._trainable:
            _collect_gradient(one)
            if is_last and one.shard.grad is None:
                one.shard.grad = torch.zeros_like(one.shard, dtype=one.shard.grad_dtype)

    def gather_parameters(self) -> None:
        """Does nothing: the next forward all-gathers."""


def _synchronise(root: FSDPModule, *, now: bool, replicas: bool) -> None:
    """Set whether the next backward reduce-scatters gradients, and whether it all-reduces over replicas."""
    root.set_requires_gradient_sync(now)  # first: it also sets the all-reduce
    root.set_requires_all_reduce(replicas)


def _collect_gradient(one: ParameterShard) -> None:
    """Add the gradient that FSDP2 left to the shard's gradient, which may have a wider dtype."""
    gradient, one.parameter.grad = one.parameter.grad, None
    if isinstance(gradient, DTensor):
        local = gradient.to_local().to(one.shard.grad_dtype)
        one.shard.grad = local if one.shard.grad is None else one.shard.grad.add_(local)


Reducer = GradientReducer | FullyShardedReducer


def build_reducer(
    shards: list[ParameterShard], mesh: Mesh, *, roots: Sequence[nn.Module], measures_waits: bool = False
) -> Reducer:
    """The reducer for the mesh's ZeRO stage; `roots` are the models of this rank.

    `measures_waits`: also those of ZeRO-3, by hooks on its units, which compiled units cannot have.
    """
    if mesh.parallel.zero == 3:
        wait = measure_waits(roots, mesh.device) if measures_waits else None
        every_microbatch = mesh.parallel.grad_reduce == "each_microbatch"
        return FullyShardedReducer(shards, roots, every_microbatch=every_microbatch, wait=wait)
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
    """ZeRO-3 (FSDP, HSDP with dp_replicate): each unit is all-gathered when it is used, then freed.

    FSDP2 prefetches the next unit while one computes. A pipeline keeps parameters gathered during a step:
    to gather them for every micro-batch of every stage would cost pp times the traffic. With `on_host` shards
    and their gradients live in host memory, and only gathered parameters are on the device.
    """
    parallel = mesh.parallel
    # Inputs are not cast: loss weights and rope tables stay fp32; autocast lowers what should be lower.
    policy = MixedPrecisionPolicy(
        param_dtype=lower, reduce_dtype=gradients if lower else None, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if on_host else OffloadPolicy()
    shard = partial(
        fully_shard, mp_policy=policy, offload_policy=offload, reshard_after_forward=parallel.pp == 1
    )
    with frozen_integers():
        if parallel.ep > 1:
            expert_mesh = _sharding_mesh(mesh.expert, "expert_shard", parallel.dp_replicate)
            for module in experts:
                shard(module, mesh=expert_mesh)
        dense_mesh = _sharding_mesh(mesh.dense, "shard", parallel.dp_replicate)
        for module in [*units, root]:
            shard(module, mesh=dense_mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global token count: sum, never average. A factor other than the
            # group size would need PREMUL_SUM, which gloo lacks and NCCL gets wrong for bf16.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _sharding_mesh(axes, shard_axis: str, dp_replicate: int):
    return axes[("dp_replicate", shard_axis)] if dp_replicate > 1 else axes[shard_axis]
