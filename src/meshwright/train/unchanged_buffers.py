"""Forward and backward passes beside those of training leave the buffers of a model as they were."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged_buffers(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Restores afterwards what a forward writes into buffers: expert loads, amax of fp8 inputs.

    Weights that are kept in fp8 are left out: they are large, and a forward does not write to them.
    """
    buffers = [buffer for stage in stages for buffer in stage.buffers() if buffer.itemsize > 1]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
