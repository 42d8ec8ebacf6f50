"""Optimizer states (and weights) in host memory, which pass through the device bucket by bucket.

    fetch bucket 0
    for each bucket k:   wait until bucket k - 1 is back on the host, and free it
                         start to fetch bucket k + 1
                         update bucket k on the device
                         start to send bucket k back

So at most two buckets are on the device, and both directions of the bus are used at once. A bucket is a
matrix with the vectors before it, large enough for full bandwidth where bandwidth matters; or a whole block,
where its weights live on the host too. The update runs on the device, so it is the same arithmetic, bit by
bit, as without offload.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.memory.offload.host import HostBuffer, HostLink
from meshwright.memory.offload.weights import HostedWeights
from meshwright.optim.build import build_optimizer
from meshwright.optim.combined import JoinedOptimizer
from meshwright.optim.full_parameter import Whole
from meshwright.optim.rounding import WeightFormat
from meshwright.spec import OptimSpec


class HostedState:
    """One state tensor: its buffer on the host, and between fetch and retire a copy on the device."""

    def __init__(self, holder: dict[str, Any], key: str, link: HostLink) -> None:
        self._holder, self._key, self._link = holder, key, link
        on_device: Tensor = holder[key]
        self._home: HostBuffer = link.pool.take(on_device.nbytes)
        self._device_type = on_device.device
        self._copied = link.send(on_device, self._home)
        self._on_host = self._home.shaped(on_device)
        self._copied.wait()
        holder[key] = self._on_host

    def fetch(self) -> None:
        """Start to bring it to the device."""
        target = torch.empty_like(self._on_host, device=self._device_type)
        self._link.account.hold_on_device(target.nbytes)
        self._copied = self._link.fetch(self._home, target)
        self._holder[self._key] = target

    def arrive(self) -> None:
        """The update may use it now."""
        self._copied.wait()

    def send(self) -> None:
        """Start to bring the new values back."""
        self._copied = self._link.send(self._holder[self._key], self._home)

    def retire(self) -> None:
        """Free the copy on the device as soon as it has been sent."""
        self._copied.wait()
        self._link.account.hold_on_device(-self._on_host.nbytes)
        self._holder[self._key] = self._on_host


class Hosted(Protocol):
    """What lives on the host and is on the device for an update."""

    def fetch(self) -> None:
        """Start to bring it."""
        ...

    def arrive(self) -> None:
        """The update may use it now."""
        ...

    def send(self) -> None:
        """Start to bring the new values back."""
        ...

    def retire(self) -> None:
        """Free it on the device as soon as it has been sent."""
        ...


class Bucket:
    """Some shards, their own optimizer, and what of them lives on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer, hosted: Sequence[Hosted]) -> None:
        self.optimizer, self._hosted = optimizer, hosted

    def fetch(self) -> None:
        """Start to bring everything."""
        for hosted in self._hosted:
            hosted.fetch()

    def update(self) -> None:
        """One update, whose results start to go back."""
        for hosted in self._hosted:
            hosted.arrive()
        self.optimizer.step()
        for hosted in self._hosted:
            hosted.send()

    def retire(self) -> None:
        """Everything is back: free it here."""
        for hosted in self._hosted:
            hosted.retire()


class StreamedOptimizer(JoinedOptimizer):
    """An optimizer over buckets; from outside one optimizer, whose state is found on the host."""

    def __init__(self, buckets: list[Bucket]) -> None:
        super().__init__([bucket.optimizer for bucket in buckets])
        self._buckets = buckets

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every shard; all ranks call it together."""
        assert closure is None, "gradients are accumulated before the step"
        self._buckets[0].fetch()
        for previous, bucket, following in _with_neighbours(self._buckets):
            if previous is not None:
                previous.retire()
            if following is not None:
                following.fetch()
            bucket.update()
        self._buckets[-1].retire()


def _with_neighbours(buckets: list[Bucket]) -> Iterator[tuple[Bucket | None, Bucket, Bucket | None]]:
    padded = [None, *buckets, None]
    for (before, bucket), (_, after) in pairwise(pairwise(padded)):
        assert bucket is not None
        yield before, bucket, after


def build_streamed_optimizer(
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    wholes: Mapping[str, Whole],
    *,
    weights: HostedWeights,
    weight_format: WeightFormat = "fp32",
    with_states: bool,
    simulated: SimulatedDevice | None = None,
) -> StreamedOptimizer:
    """Like `build_optimizer`; states go to the host as they are made, so they never lie together here."""
    buckets: list[Bucket] = []
    for part in bucketed(shards, weights):
        optimizer = build_optimizer(part, optim, wholes, weights=weight_format, simulated=simulated)
        block = weights.of(next(iter(part)))
        states = hosted_states(optimizer, weights.link) if with_states else []
        buckets.append(Bucket(optimizer, [*states, *([] if block is None else [block])]))
    return StreamedOptimizer(buckets)


def hosted_states(optimizer: torch.optim.Optimizer, link: HostLink) -> list[HostedState]:
    """Every state tensor of an optimizer, moved to the host."""
    return [
        HostedState(state, key, link)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim  # counts of updates stay: they are scalars
    ]


def bucketed(shards: Mapping[str, nn.Parameter], weights: HostedWeights) -> Iterator[dict[str, nn.Parameter]]:
    """Hosted blocks, and runs of other shards that each end with a matrix (or with the vectors left over)."""
    bucket: dict[str, nn.Parameter] = {}
    for name, shard in shards.items():
        if bucket and weights.of(name) is not weights.of(next(iter(bucket))):
            yield bucket
            bucket = {}
        bucket[name] = shard
        if shard.ndim >= 2 and weights.of(name) is None:
            yield bucket
            bucket = {}
    if bucket:
        yield bucket
