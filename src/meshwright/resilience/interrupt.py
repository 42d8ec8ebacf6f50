"""Stop signals: the first one asks the loop to save and end, the second one ends at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class Interrupt:
    """Whether a signal asked this process to stop."""

    def __init__(self) -> None:
        self.is_requested = False

    def request(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a stop signal."""
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True

    def is_requested_anywhere(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it at the same step. Communicates (host)."""
        if dist.get_world_size() == 1:
            return self.is_requested
        flag = torch.tensor([int(self.is_requested)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


@contextmanager
def stop_signals() -> Iterator[Interrupt]:
    """While inside, SIGINT, SIGTERM and SIGUSR1 (a scheduler's early warning) ask for a stop."""
    interrupt = Interrupt()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, interrupt.request) for number in signals}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
