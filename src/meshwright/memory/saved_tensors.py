"""What selective recompute keeps, handed to a keeper between the two passes.

Torch's own contexts for selective recompute hold it where it was made. These do the same work and let
somebody else hold it: offload keeps it on the host. Eager only: the compiler knows torch's contexts and no
others, and it hands all that it keeps to autograd, where offload finds it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container
from typing import Any, Protocol

from torch import Tensor

# Named private by its module, and documented by torch as the way to see every operator.
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import SpecError

Kept = dict[Any, deque[Any]]
"""By operator, in order: its outputs, each tensor as the call that brings it back."""


class Keeper(Protocol):
    """Holds tensors of the block at work until its backward."""

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Take a tensor over; the call gives it back."""
        ...


def keeping_contexts(operators: Container[Any], keeper: Keeper) -> tuple[Any, Any]:
    """For `checkpoint`: around the first pass, and around the second, which runs these operators no more."""
    kept: Kept = defaultdict(deque)
    return _FirstPass(operators, keeper, kept), _SecondPass(operators, kept)


class _FirstPass(TorchDispatchMode):
    def __init__(self, operators: Container[Any], keeper: Keeper, kept: Kept) -> None:
        super().__init__()
        self._operators, self._keeper, self._kept = operators, keeper, kept
        self._versions: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._kept[func].append(_each(outputs, Tensor, self._take))
        return outputs

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        is_changed = any(tensor._version != version for tensor, version in self._versions)
        self._versions.clear()
        if is_changed and error[0] is None:
            raise SpecError(
                "a block changes the output of a product, a convolution or attention in place",
                where="memory.recompute",
                hint="use recompute=full, which keeps none of them",
            )

    def _take(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._versions.append((tensor, tensor._version))
        return self._keeper.keep(tensor)


class _SecondPass(TorchDispatchMode):
    def __init__(self, operators: Container[Any], kept: Kept) -> None:
        super().__init__()
        self._operators, self._kept = operators, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            return _each(self._kept[func].popleft(), Callable, lambda bring: bring())
        return func(*args, **(kwargs or {}))


def _each(outputs: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """An operator's outputs with those of a kind changed: one, or several beside numbers and nothing."""
    if isinstance(outputs, tuple | list):
        return type(outputs)(_each(one, kind, change) for one in outputs)
    return change(outputs) if isinstance(outputs, kind) else outputs
