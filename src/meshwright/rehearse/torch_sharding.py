"""DTensor's sharding propagation, kept out of a trace.

DTensor runs an operator once at its global shape to learn the shape of the result. Those tensors are not
allocated by the step. The propagator is private (`torch.distributed.tensor._sharding_prop`) and has no public
switch, so the one method that runs the operator is wrapped.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor._sharding_prop import ShardingPropagator

_METHOD = "_propagate_tensor_meta_non_cached"


@contextlib.contextmanager
def propagation_excluded(
    paused: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Inside, DTensor's trial operators run within the context that `paused` makes."""
    propagate: Any = getattr(ShardingPropagator, _METHOD)

    def excluded(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return propagate(*args, **kwargs)

    with patch.object(ShardingPropagator, _METHOD, excluded):
        yield
