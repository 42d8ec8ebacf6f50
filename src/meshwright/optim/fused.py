"""Adam's arithmetic as plain torch functions, which on CUDA are compiled into one kernel.

A function updates [rows, columns] tensors. On CUDA it is compiled once for all shapes; values that change
from step to step are scalars on the device, so that they cause no recompilation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.optim.rounding_noise import step_key
from meshwright.optim.sharded import ShardUpdate

# torch's own limit of 8 is too low for two formats in one process.
RECOMPILE_LIMIT = 64


class AdamScalars(NamedTuple):
    """Scalars of one update: floats, or device tensors, which cause no recompilation when they change."""

    decay_factor: float | Tensor
    """1 - lr x decay."""
    step_size: float | Tensor
    """lr / (1 - beta1^t)."""
    bias_correction2_sqrt: float | Tensor
    """sqrt(1 - beta2^t)."""
    one_minus_beta1: float | Tensor
    beta2: float | Tensor
    one_minus_beta2: float | Tensor
    eps: float | Tensor
    gradient_scale: float | Tensor
    """Factor of the gradient (clipping)."""


class AdamScalarCache:
    """The scalars of one update, computed once for each learning rate and weight decay."""

    def __init__(
        self, betas: tuple[float, float], eps: float, num_updates: int, gradient_scale: float | Tensor
    ) -> None:
        self._betas, self._eps, self._num_updates = betas, eps, num_updates
        self._gradient_scale = gradient_scale
        self._known: dict[tuple[float, float], AdamScalars] = {}
        self._key: Tensor | None = None

    def of(self, part: ShardUpdate) -> AdamScalars:
        """The scalars of a shard, in its dtype where they are tensors."""
        key = (part.lr, part.weight_decay)
        if key not in self._known:
            plain = self.plain(part)
            self._known[key] = plain if part.shard.device.type == "cpu" else _on_device(plain, part.shard)
        return self._known[key]

    def key(self, part: ShardUpdate) -> Tensor:
        """The key of this update's rounding noise."""
        if self._key is None:
            self._key = step_key(self._num_updates, part.shard.device)
        return self._key

    def plain(self, part: ShardUpdate) -> AdamScalars:
        """The scalars as floats, except a gradient scale that is on the device."""
        beta1, beta2 = self._betas
        return AdamScalars(
            decay_factor=1.0 - part.lr * part.weight_decay,
            step_size=part.lr / (1.0 - beta1**self._num_updates),
            bias_correction2_sqrt=(1.0 - beta2**self._num_updates) ** 0.5,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            eps=self._eps,
            gradient_scale=self._gradient_scale,
        )


def _on_device(plain: AdamScalars, like: Tensor) -> AdamScalars:
    """The scalars as tensors, filled on the device: no host sync."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return AdamScalars(
        *(
            one.to(dtype) if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=like.device)
            for one in plain
        )
    )


def updated_moments(first: Tensor, second: Tensor, g: Tensor, scalars: AdamScalars) -> tuple[Tensor, Tensor]:
    """Both moments after one more gradient."""
    g = g * scalars.gradient_scale
    first = first + scalars.one_minus_beta1 * (g - first)
    return first, second * scalars.beta2 + scalars.one_minus_beta2 * g * g


def updated_weight(weight: Tensor, first: Tensor, second: Tensor, scalars: AdamScalars) -> Tensor:
    """The weight after weight decay and one step along the bias-corrected moments."""
    return weight * scalars.decay_factor - scalars.step_size * (
        first / (second.sqrt() / scalars.bias_correction2_sqrt + scalars.eps)
    )


@contextmanager
def fused_kernel(
    update: Callable[..., None], parts: Sequence[ShardUpdate], simulated: SimulatedDevice | None
) -> Iterator[Callable[..., None]]:
    """The update as one compiled kernel where the shards are on CUDA, else as it is."""
    if simulated is not None:
        yield lambda *_: None  # the compiled kernel allocates nothing
    elif any(part.shard.is_cuda for part in parts):
        with torch.compiler.config.patch(recompile_limit=RECOMPILE_LIMIT):  # pyright: ignore[reportAttributeAccessIssue]
            yield _compiled(update)
    else:
        yield update


@cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    """The compiled update: one kernel for each set of dtypes and dims, not for each size."""
    return torch.compile(update, dynamic=True, fullgraph=True)
