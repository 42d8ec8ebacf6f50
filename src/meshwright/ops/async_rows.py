"""An all-to-all of rows that is launched in one place and waited for in another; gradients flow through it.

    in_flight = exchange.launch(x)       forward launches    backward waits
    ...                                  runs while the rows are in flight, and so does its backward
    y = exchange.wait(in_flight)         forward waits       backward launches the way back

Autograd runs the backward of what was called last first. So the backward of what stands between the two calls
runs between the launch and the wait of the gradients' exchange. Nothing reads `in_flight` but `wait`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class RowExchange:
    """Uneven all-to-all: the first sent[0] rows go to rank 0 and so on; received[r] rows come from rank r."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._work: dist.Work | None = None
        self._out: Tensor | None = None

    # The compiler would make a launch and its wait one synchronous collective of its graph.
    @torch.compiler.disable(recursive=True)
    def launch(self, x: Tensor) -> Tensor:
        """The rows that other ranks send here, still in flight. All ranks of the group call it."""
        return _Launch.apply(x, self)  # pyright: ignore[reportReturnType]

    @torch.compiler.disable(recursive=True)
    def wait(self, in_flight: Tensor) -> Tensor:
        """The rows that `launch` returned, arrived."""
        return _Wait.apply(in_flight, self)  # pyright: ignore[reportReturnType]

    def start(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Launch one all-to-all without gradients; its result is in flight."""
        self._out = x.new_empty(sum(received), *x.shape[1:])
        self._work = dist.all_to_all_single(
            self._out, x.contiguous(), received, sent, group=self.group, async_op=True
        )
        return self._out

    def finish(self) -> Tensor:
        """Wait for the all-to-all that was launched last; its result."""
        assert self._work is not None and self._out is not None
        self._work.wait()
        out, self._work, self._out = self._out, None, None
        return out


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del grad  # the rows that _Wait sent: it kept their memory until now
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_flight: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return in_flight.view_as(in_flight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        exchange = ctx.exchange
        sent = grad.contiguous()
        exchange.start(sent, exchange.received, exchange.sent)
        return sent, None
