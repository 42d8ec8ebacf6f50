"""Refuses a loop that trains nothing: `loss.backward()` and `optimizer.step()` of a plain torch loop.

After `prepare` the gradients are reduced by `run.backward` and the weights are updated by `run.step`. The
plain calls would run without an error and leave the weights as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.errors import SpecError

_HINT = (
    "write `run.backward(loss_sum, count)` in place of loss.backward(), and `run.step()` in place of "
    "optimizer.step()"
)


class LoopGuard:
    """Counts the calls of a user's loop, and refuses an update that is not ours."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_batches = self.num_backwards = self.num_steps = 0
        self._is_ours = False
        optimizer.register_step_pre_hook(self._refuse_plain_step)

    @contextmanager
    def our_update(self) -> Iterator[None]:
        """While inside, `optimizer.step()` is called by `run.step`."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def require_training(self) -> None:
        """Refuse batches that no call has trained on."""
        if self.num_batches and not self.num_backwards:
            raise _untrained(f"{self.num_batches} batches were read and run.backward was never called")
        if self.num_backwards and not self.num_steps:
            raise _untrained(f"run.backward was called {self.num_backwards} times and run.step never")

    def _refuse_plain_step(self, *_: object) -> None:
        if not self._is_ours:
            raise _untrained("optimizer.step() was called by itself, and would leave the weights unchanged")


def _untrained(fact: str) -> SpecError:
    return SpecError(fact, where="prepare", hint=_HINT)
