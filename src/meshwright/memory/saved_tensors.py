"""Selective recompute that stores what it saves elsewhere: with offload, on the host.

torch's own contexts for selective recompute (selective activation checkpointing) hold saved outputs on the
device. These contexts do the same work and pass each output to a store, which gives it back in backward.
Eager only: the compiler supports torch's contexts only, and passes all that it saves to autograd, where
offload finds it.

`Tensor._version`, which counts in-place writes, is private; torch's own check of saved outputs uses it too.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container
from typing import Any, Protocol

from torch import Tensor

from meshwright.errors import SpecError
from meshwright.ops.torch_dispatch import TorchDispatchMode

Stored = dict[Any, deque[Any]]
"""Outputs of each operator in order of its calls; each tensor is a function that loads it."""


class SavedTensorStore(Protocol):
    """Holds tensors of the block whose forward runs until its backward."""

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Take over a tensor; the returned function loads it."""
        ...


def storing_contexts(operators: Container[Any], store: SavedTensorStore) -> tuple[Any, Any]:
    """Contexts for `checkpoint`: of the first forward, and of the recompute, which skips `operators`."""
    stored: Stored = defaultdict(deque)
    return _FirstForward(operators, store, stored), _Recompute(operators, stored)


class _FirstForward(TorchDispatchMode):
    def __init__(self, operators: Container[Any], store: SavedTensorStore, stored: Stored) -> None:
        super().__init__()
        self._operators, self._store, self._stored = operators, store, stored
        self._versions: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._stored[func].append(_map_outputs(outputs, Tensor, self._save))
        return outputs

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        is_changed = any(tensor._version != version for tensor, version in self._versions)
        self._versions.clear()
        if is_changed and error[0] is None:
            raise SpecError(
                "a block changes the output of a matmul, a convolution or attention in place",
                where="memory.recompute",
                hint="use recompute=full, which saves none of them",
            )

    def _save(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._versions.append((tensor, tensor._version))
        return self._store.store(tensor)


class _Recompute(TorchDispatchMode):
    def __init__(self, operators: Container[Any], stored: Stored) -> None:
        super().__init__()
        self._operators, self._stored = operators, stored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            return _map_outputs(self._stored[func].popleft(), Callable, lambda load: load())
        return func(*args, **(kwargs or {}))


def _map_outputs(outputs: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """An operator's outputs with `change` applied to those of one kind; numbers and None stay."""
    if isinstance(outputs, tuple | list):
        return type(outputs)(_map_outputs(one, kind, change) for one in outputs)
    return change(outputs) if isinstance(outputs, kind) else outputs
