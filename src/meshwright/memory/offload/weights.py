"""Parameter offload: the weights of blocks are in host memory, and on the device while their block computes.

Forward and backward each prefetch the weights of the next block while this one computes, and free them when
the block is done: the weights of two blocks are on the device. A parameter keeps its tensor; only the storage
behind it is resized to zero and filled again, so what autograd saved of it is valid when backward comes.
Weights are copy back to the host only after an update. Embedding, head and the last norm are used at both
ends of a pass, and stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.memory.offload.host import CopyEvent, HostBuffer, HostLink


class OffloadedBlock:
    """The offloaded parameters of one block."""

    def __init__(self, block: nn.Module, link: HostLink) -> None:
        self._block, self._link = block, link
        self._tensors: list[Tensor] = []
        self._buffers: list[HostBuffer] = []
        self._copies: list[CopyEvent] = []
        self._num_bytes = 0
        self.is_on_device = True

    def move_to_host(self) -> None:
        """Move the initialised parameters to the host."""
        self._tensors = [_alias(parameter) for parameter in self._block.parameters()]
        self._num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._buffers = [self._link.pool.take(tensor.nbytes) for tensor in self._tensors]
        self._link.counters.add_device_bytes(self._num_bytes)
        self.write_back()
        self.free()

    def prefetch(self) -> None:
        """Start to fetch them, unless they are on the device."""
        if self.is_on_device:
            return
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.is_on_device = True  # only now: after an OOM above, prefetch may be called again
        self._link.counters.add_device_bytes(self._num_bytes)
        pairs = zip(self._buffers, self._tensors, strict=True)
        self._copies = [self._link.fetch(buffer, tensor) for buffer, tensor in pairs]

    def wait(self) -> None:
        """Make the current stream wait until they are on the device."""
        for copy in self._copies:
            copy.wait()

    def write_back(self) -> None:
        """Start to copy changed values to the host."""
        pairs = zip(self._tensors, self._buffers, strict=True)
        self._copies = [self._link.send(tensor, buffer) for tensor, buffer in pairs]

    def free(self) -> None:
        """Free them on the device, after copies in flight."""
        if not self.is_on_device:
            return
        self.wait()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._link.counters.add_device_bytes(-self._num_bytes)
        self.is_on_device = False


def _alias(parameter: Tensor) -> Tensor:
    """Another tensor over a parameter's storage: autograd does not see writes to it."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().data


class OffloadedWeights:
    """The blocks of this rank whose weights are offloaded; none without parameter offload."""

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self.blocks: dict[str, OffloadedBlock] = {}
        """By the prefix of their parameters' names, such as `blocks.3.`."""

    def apply(self, blocks: dict[str, nn.Module]) -> None:
        """Make blocks, in the order in which they run, prefetch and free their weights."""
        offloaded = [OffloadedBlock(block, self.link) for block in blocks.values()]
        neighbours = zip([None, *offloaded], [*offloaded[1:], None], strict=False)
        for (name, block), one, (before, after) in zip(blocks.items(), offloaded, neighbours, strict=True):
            block.forward = _with_prefetch(block.forward, one, before=before, after=after)
            self.blocks[f"blocks.{name}."] = one

    def move_to_host(self) -> None:
        """Move all initialised parameters to the host."""
        for block in self.blocks.values():
            block.move_to_host()

    def block_of(self, name: str) -> OffloadedBlock | None:
        """The offloaded block that a parameter belongs to, if any."""
        return next((block for begin, block in self.blocks.items() if name.startswith(begin)), None)

    @contextmanager
    def all_on_device(self, *, changing: bool = False) -> Iterator[None]:
        """Inside, all weights are on the device; `changing` writes them back to the host at the end."""
        for block in self.blocks.values():
            block.prefetch()
            block.wait()
        yield
        for block in self.blocks.values():
            if changing:
                block.write_back()
            block.free()


def _with_prefetch(
    forward: Callable[..., Any],
    block: OffloadedBlock,
    *,
    before: OffloadedBlock | None,
    after: OffloadedBlock | None,
) -> Callable[..., Any]:
    def offloaded(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        _prefetch_both(block, after)
        if torch.is_grad_enabled():
            x = _BackwardEnds.apply(x, block)  # pyright: ignore[reportAssignmentType]
        result = forward(x, *args, **kwargs)
        block.free()
        return _BackwardBegins.apply(result, block, before) if torch.is_grad_enabled() else result

    return offloaded


def _prefetch_both(block: OffloadedBlock, following: OffloadedBlock | None) -> None:
    block.prefetch()
    if following is not None:
        following.prefetch()
    block.wait()


class _BackwardBegins(torch.autograd.Function):
    """The identity on a block's output: its backward runs first in the block and prefetches the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: OffloadedBlock, before: OffloadedBlock | None) -> Tensor:
        ctx.block, ctx.before = block, before
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _prefetch_both(ctx.block, ctx.before)
        return grad, None, None


class _BackwardEnds(torch.autograd.Function):
    """The identity on a block's input: its backward runs last in the block and frees the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: OffloadedBlock) -> Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.block.free()
        return grad, None
