"""Optimizer offload: states (and weights) in host memory, which pass through the device bucket by bucket.

    prefetch bucket 0
    for each bucket k:   wait until bucket k - 1 is back on the host, and free it on the device
                         prefetch bucket k + 1
                         update bucket k on the device
                         start to write bucket k back

So at most two buckets are on the device, and both directions of the bus are busy at once. A bucket is a
matrix with the vectors before it, large enough for full bandwidth where bandwidth matters; or a full block,
where its weights are offloaded too. The update runs on the device, so it is bit for bit the same arithmetic
as without offload.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.memory.offload.host import HostBuffer, HostLink
from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.optim.build import build_optimizer
from meshwright.optim.combined import CombinedOptimizer
from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.rounding import WeightFormat
from meshwright.spec import OptimSpec


class OffloadedState:
    """One state tensor: its host buffer, and between `prefetch` and `free` a copy on the device."""

    def __init__(self, holder: dict[str, Any], key: str, link: HostLink) -> None:
        self._holder, self._key, self._link = holder, key, link
        on_device: Tensor = holder[key]
        self._buffer: HostBuffer = link.pool.take(on_device.nbytes)
        self._device = on_device.device
        self._copy = link.send(on_device, self._buffer)
        self._on_host = self._buffer.view_as(on_device)
        self._copy.wait()
        holder[key] = self._on_host

    def prefetch(self) -> None:
        """Start to fetch it to the device."""
        target = torch.empty_like(self._on_host, device=self._device)
        self._link.counters.add_device_bytes(target.nbytes)
        self._copy = self._link.fetch(self._buffer, target)
        self._holder[self._key] = target

    def wait(self) -> None:
        """Make the current stream wait until it is on the device."""
        self._copy.wait()

    def write_back(self) -> None:
        """Start to copy the new values to the host."""
        self._copy = self._link.send(self._holder[self._key], self._buffer)

    def free(self) -> None:
        """Free the copy on the device once it is written back."""
        self._copy.wait()
        self._link.counters.add_device_bytes(-self._on_host.nbytes)
        self._holder[self._key] = self._on_host


class Offloaded(Protocol):
    """Something in host memory that is on the device during an update."""

    def prefetch(self) -> None:
        """Start to fetch it to the device."""
        ...

    def wait(self) -> None:
        """Make the current stream wait until it is on the device."""
        ...

    def write_back(self) -> None:
        """Start to copy the new values to the host."""
        ...

    def free(self) -> None:
        """Free it on the device once it is written back."""
        ...


class OptimizerBucket:
    """Some shards, an optimizer over them, and what of them is offloaded."""

    def __init__(self, optimizer: torch.optim.Optimizer, offloaded: Sequence[Offloaded]) -> None:
        self.optimizer, self._offloaded = optimizer, offloaded

    def prefetch(self) -> None:
        """Start to fetch everything."""
        for offloaded in self._offloaded:
            offloaded.prefetch()

    def update(self) -> None:
        """Run one update, and start to write its results back."""
        for offloaded in self._offloaded:
            offloaded.wait()
        self.optimizer.step()
        for offloaded in self._offloaded:
            offloaded.write_back()

    def free(self) -> None:
        """Free everything on the device once it is written back."""
        for offloaded in self._offloaded:
            offloaded.free()


class StreamedOptimizer(CombinedOptimizer):
    """An optimizer over buckets that acts as one optimizer, whose state is in host memory."""

    def __init__(self, buckets: list[OptimizerBucket]) -> None:
        super().__init__([bucket.optimizer for bucket in buckets])
        self._buckets = buckets

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every shard; all ranks call it together."""
        assert closure is None, "gradients are accumulated before the step"
        self._buckets[0].prefetch()
        for previous, bucket, following in _with_neighbours(self._buckets):
            if previous is not None:
                previous.free()
            if following is not None:
                following.prefetch()
            bucket.update()
        self._buckets[-1].free()


def _with_neighbours(
    buckets: list[OptimizerBucket],
) -> Iterator[tuple[OptimizerBucket | None, OptimizerBucket, OptimizerBucket | None]]:
    padded = [None, *buckets, None]
    for (before, bucket), (_, after) in pairwise(pairwise(padded)):
        assert bucket is not None
        yield before, bucket, after


def build_streamed_optimizer(
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    full_parameters: Mapping[str, FullParameter],
    *,
    weights: OffloadedWeights,
    weight_format: WeightFormat = "fp32",
    with_states: bool,
    simulated: SimulatedDevice | None = None,
) -> StreamedOptimizer:
    """As `build_optimizer`; states are offloaded as they are made, so they never fill the device."""
    buckets: list[OptimizerBucket] = []
    parts: list[dict[str, nn.Parameter]] = list(optimizer_buckets(shards, weights))
    for part in parts or [{}]:  # a pipeline stage may train nothing
        optimizer = build_optimizer(part, optim, full_parameters, weights=weight_format, simulated=simulated)
        block = weights.block_of(next(iter(part))) if part else None
        states = offload_states(optimizer, weights.link) if with_states else []
        buckets.append(OptimizerBucket(optimizer, [*states, *([] if block is None else [block])]))
    return StreamedOptimizer(buckets)


def offload_states(optimizer: torch.optim.Optimizer, link: HostLink) -> list[OffloadedState]:
    """Move every state tensor of an optimizer to the host."""
    return [
        OffloadedState(state, key, link)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim  # step counts stay: they are scalars
    ]


def optimizer_buckets(
    shards: Mapping[str, nn.Parameter], weights: OffloadedWeights
) -> Iterator[dict[str, nn.Parameter]]:
    """Offloaded blocks, and runs of other shards that each end with a matrix (or the last vectors)."""
    bucket: dict[str, nn.Parameter] = {}
    for name, shard in shards.items():
        if bucket and weights.block_of(name) is not weights.block_of(next(iter(bucket))):
            yield bucket
            bucket = {}
        bucket[name] = shard
        if shard.ndim >= 2 and weights.block_of(name) is None:
            yield bucket
            bucket = {}
    if bucket:
        yield bucket
