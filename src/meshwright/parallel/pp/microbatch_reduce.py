"""Gradient reduction after every micro-batch of a pipeline (`grad_reduce=each_microbatch`).

Torch's pipeline stages make FSDP2 keep gradients unsharded right before each backward, and none of our code
runs between that and autograd. So a hook on the stage's output, which backward reaches first, starts the
reduction. Split backwards compute weight gradients without autograd's hooks, so they reduce after the last
micro-batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.parallel.dp import Reducer


class StepReduction:
    """Notifies a reducer that reduces each micro-batch as a micro-batch's backward begins on a stage."""

    def __init__(self, stages: Sequence[nn.Module], reducer: Reducer) -> None:
        self._reducer, self._remaining = reducer, {id(stage): 0 for stage in stages}
        if reducer.reduces_each_microbatch:
            for stage in stages:
                stage.register_forward_hook(self._add_hook)

    @contextmanager
    def of_step(self, num_microbatches: int) -> Iterator[None]:
        """Entered around a schedule of that many micro-batches; on exit all gradients are reduced."""
        self._remaining = dict.fromkeys(self._remaining, num_microbatches)
        with self._reducer.schedule():
            yield

    def _add_hook(self, stage: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._begin, stage))

    def _begin(self, stage: nn.Module, _gradient: Tensor) -> None:
        self._remaining[id(stage)] -= 1
        self._reducer.begin_backward(stage, is_last=self._remaining[id(stage)] == 0)
