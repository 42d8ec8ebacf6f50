"""Gradients of a pipeline reduced micro-batch by micro-batch.

Torch's stages tell FSDP2 to keep gradients whole, right before each backward, and nothing of ours runs
between that and autograd. So the word comes from inside: a hook on what the stage put out, the first thing
that a backward comes to. Split backwards come to weights without autograd's hooks, so they are reduced last.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.parallel.dp import Reducer


class StepReduction:
    """Tells the reducer, where it wants to know, as each micro-batch's backward begins on a stage."""

    def __init__(self, stages: Sequence[nn.Module], reducer: Reducer) -> None:
        self._reducer, self._left = reducer, {id(stage): 0 for stage in stages}
        if reducer.reduces_each_microbatch:
            for stage in stages:
                stage.register_forward_hook(self._watch)

    @contextmanager
    def of_step(self, num_microbatches: int) -> Iterator[None]:
        """Entered around a schedule's run of that many micro-batches; on leaving, all is reduced."""
        self._left = dict.fromkeys(self._left, num_microbatches)
        with self._reducer.schedule():
            yield

    def _watch(self, stage: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._begin, stage))

    def _begin(self, stage: nn.Module, _gradient: Tensor) -> None:
        self._left[id(stage)] -= 1
        self._reducer.begin_backward(stage, is_last=self._left[id(stage)] == 0)
