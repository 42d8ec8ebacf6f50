"""Compiled functions with dynamic shapes whose floats are constants. Torch has no public option for that."""

from collections.abc import Callable
from typing import Any

import torch


def with_constant_floats(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; the floats that it reads from modules are compiled in.

    `dynamic=True` makes inputs of the graph of them too, and then the compiler fails at one that two
    autograd functions read, such as the probability of an adapter's dropout.
    """
    dynamo: Any = torch._dynamo

    def forward(*args: Any, **kwargs: Any) -> Any:
        with dynamo.config.patch(specialize_float=True):
            return compiled(*args, **kwargs)

    return forward
