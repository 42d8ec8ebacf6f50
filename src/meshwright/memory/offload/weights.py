"""Weights of blocks in host memory; a block's are on the device while it computes.

Forward and backward each bring them, the next block's while this one computes, and drop them when the block
is done: two blocks are on the device. A parameter keeps its tensor; only the storage behind it is emptied and
filled, so whatever autograd has saved of it is right again when backward comes. Nothing is sent back but
after the update. Embedding, head and the last norm are used at both ends of a pass, and stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.memory.offload.host import Copied, HostBuffer, HostLink


class HostedBlock:
    """The parameters of one block."""

    def __init__(self, block: nn.Module, link: HostLink) -> None:
        self._block, self._link = block, link
        self._tensors: list[Tensor] = []
        self._homes: list[HostBuffer] = []
        self._copies: list[Copied] = []
        self._num_bytes = 0
        self.is_here = True

    def move_in(self) -> None:
        """The parameters have their values: from now on they live on the host."""
        self._tensors = [_alias(parameter) for parameter in self._block.parameters()]
        self._num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._homes = [self._link.pool.take(tensor.nbytes) for tensor in self._tensors]
        self._link.account.hold_on_device(self._num_bytes)
        self.send()
        self.retire()

    def fetch(self) -> None:
        """Start to bring them, unless they are here."""
        if self.is_here:
            return
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.is_here = True  # not before: a device that has no room may be asked again
        self._link.account.hold_on_device(self._num_bytes)
        pairs = zip(self._homes, self._tensors, strict=True)
        self._copies = [self._link.fetch(home, tensor) for home, tensor in pairs]

    def arrive(self) -> None:
        """The current stream may use them now."""
        for copied in self._copies:
            copied.wait()

    def send(self) -> None:
        """Start to bring changed values to the host."""
        pairs = zip(self._tensors, self._homes, strict=True)
        self._copies = [self._link.send(tensor, home) for tensor, home in pairs]

    def retire(self) -> None:
        """Free them on the device, once what is under way has been made."""
        if not self.is_here:
            return
        self.arrive()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._link.account.hold_on_device(-self._num_bytes)
        self.is_here = False


def _alias(parameter: Tensor) -> Tensor:
    """Another tensor over a parameter's storage: writing to it is no change that autograd would object to."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().data


class HostedWeights:
    """The blocks of this rank whose weights live on the host; none where nothing is offloaded."""

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self.blocks: dict[str, HostedBlock] = {}
        """By the beginning of their parameters' names, such as `blocks.3.`."""

    def apply(self, blocks: dict[str, nn.Module]) -> None:
        """Make blocks, in the order in which they run, bring their weights themselves."""
        hosted = [HostedBlock(block, self.link) for block in blocks.values()]
        neighbours = zip([None, *hosted], [*hosted[1:], None], strict=False)
        for (name, block), one, (before, after) in zip(blocks.items(), hosted, neighbours, strict=True):
            block.forward = _around(block.forward, one, before=before, after=after)
            self.blocks[f"blocks.{name}."] = one

    def move_in(self) -> None:
        """All parameters have their values: they leave the device."""
        for block in self.blocks.values():
            block.move_in()

    def of(self, name: str) -> HostedBlock | None:
        """The block that a parameter belongs to, if it is one of these."""
        return next((block for begin, block in self.blocks.items() if name.startswith(begin)), None)

    @contextmanager
    def at_hand(self, *, changing: bool = False) -> Iterator[None]:
        """All weights on the device, where gradients are when this is not asked for; then back."""
        for block in self.blocks.values():
            block.fetch()
            block.arrive()
        yield
        for block in self.blocks.values():
            if changing:
                block.send()
            block.retire()


def _around(
    forward: Callable[..., Any], here: HostedBlock, *, before: HostedBlock | None, after: HostedBlock | None
) -> Callable[..., Any]:
    def hosted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        _bring(here, after)
        if torch.is_grad_enabled():
            x = _Done.apply(x, here)  # pyright: ignore[reportAssignmentType]
        result = forward(x, *args, **kwargs)
        here.retire()
        return _Needed.apply(result, here, before) if torch.is_grad_enabled() else result

    return hosted


def _bring(here: HostedBlock, following: HostedBlock | None) -> None:
    here.fetch()
    if following is not None:
        following.fetch()
    here.arrive()


class _Needed(torch.autograd.Function):
    """The identity on a block's output: the first of the block that backward meets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: HostedBlock, before: HostedBlock | None) -> Tensor:
        ctx.here, ctx.before = here, before
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _bring(ctx.here, ctx.before)
        return grad, None, None


class _Done(torch.autograd.Function):
    """The identity on a block's input: the last of the block that backward meets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: HostedBlock) -> Tensor:
        ctx.here = here
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.here.retire()
        return grad, None
