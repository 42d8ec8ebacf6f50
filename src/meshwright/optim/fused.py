"""Adam's arithmetic for passes that are one kernel on CUDA, and what turns them into one.

A pass is plain torch on [rows, columns] tensors. On CUDA it is compiled once for all shapes; numbers that
change from step to step are scalars on the device, so that nothing is compiled anew.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.optim.rounding_noise import step_key
from meshwright.optim.sharded import Part

# Torch gives up at 8, which two formats in one process exceed.
MOST_KINDS = 64


class Numbers(NamedTuple):
    """Of one update: floats, or scalars on the device, which a compiled pass does not bake in."""

    keep: float | Tensor
    """1 - lr x decay."""
    rate: float | Tensor
    """lr / (1 - beta1^t)."""
    root: float | Tensor
    """sqrt(1 - beta2^t)."""
    forget1: float | Tensor
    """1 - beta1."""
    beta2: float | Tensor
    forget2: float | Tensor
    """1 - beta2."""
    eps: float | Tensor
    factor: float | Tensor
    """Of the gradient."""


class UpdateNumbers:
    """The numbers of one update, made once for each rate and decay."""

    def __init__(
        self, betas: tuple[float, float], eps: float, num_updates: int, factor: float | Tensor
    ) -> None:
        self._betas, self._eps, self._num_updates, self._factor = betas, eps, num_updates, factor
        self._known: dict[tuple[float, float], Numbers] = {}
        self._key: Tensor | None = None

    def of(self, part: Part) -> Numbers:
        """Those of a part, in its dtype where they are tensors."""
        rates = (part.lr, part.weight_decay)
        if rates not in self._known:
            plain = self.plain(part)
            self._known[rates] = plain if part.shard.device.type == "cpu" else _on_device(plain, part.shard)
        return self._known[rates]

    def key(self, part: Part) -> Tensor:
        """Of this update's noise."""
        if self._key is None:
            self._key = step_key(self._num_updates, part.shard.device)
        return self._key

    def plain(self, part: Part) -> Numbers:
        """Floats, but for a factor that only the device knows."""
        beta1, beta2 = self._betas
        return Numbers(
            keep=1.0 - part.lr * part.weight_decay,
            rate=part.lr / (1.0 - beta1**self._num_updates),
            root=(1.0 - beta2**self._num_updates) ** 0.5,
            forget1=1.0 - beta1,
            beta2=beta2,
            forget2=1.0 - beta2,
            eps=self._eps,
            factor=self._factor,
        )


def _on_device(plain: Numbers, like: Tensor) -> Numbers:
    """Scalars that the device fills by itself: no host sync."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return Numbers(
        *(
            one.to(dtype) if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=like.device)
            for one in plain
        )
    )


def moved_moments(first: Tensor, second: Tensor, g: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Both moments after one more gradient."""
    g = g * numbers.factor
    first = first + numbers.forget1 * (g - first)
    return first, second * numbers.beta2 + numbers.forget2 * g * g


def moved_weight(weight: Tensor, first: Tensor, second: Tensor, numbers: Numbers) -> Tensor:
    """The weight after decay and one step along the corrected moments."""
    return weight * numbers.keep - numbers.rate * (first / (second.sqrt() / numbers.root + numbers.eps))


@contextmanager
def fused(
    one_pass: Callable[..., None], parts: Sequence[Part], simulated: SimulatedDevice | None
) -> Iterator[Callable[..., None]]:
    """The pass as one kernel where the parts lie on CUDA, else as it is."""
    if simulated is not None:
        yield lambda *_: None  # the compiled pass allocates nothing
    elif any(part.shard.is_cuda for part in parts):
        with torch.compiler.config.patch(recompile_limit=MOST_KINDS):  # pyright: ignore[reportAttributeAccessIssue]
            yield _compiled(one_pass)
    else:
        yield one_pass


@cache
def _compiled(one_pass: Callable[..., None]) -> Callable[..., None]:
    """A kernel for each kind of tensors (formats, number of dims, a single row), not for each size."""
    return torch.compile(one_pass, dynamic=True, fullgraph=True)
