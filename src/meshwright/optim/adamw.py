"""AdamW for weights or moments kept in bf16; in fp32 torch's own is used.

One pass over a shard reads weight, gradient and moments, updates them in fp32 and writes them back: on CUDA
it is compiled into one kernel that serves all shapes, elsewhere it is plain torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.stand_in import is_stand_in
from meshwright.optim.noise import NoiseGrid, draw, step_key
from meshwright.optim.rounding import bits_of, read, write
from meshwright.optim.sharded import LOWER_BITS, Part, ShardedOptimizer, Shards, wide_zeros
from meshwright.optim.whole import Whole


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


class AdamW(ShardedOptimizer):
    """Loshchilov and Hutter 2017, element by element."""

    def __init__(
        self,
        shards: Shards,
        *,
        betas: tuple[float, float],
        eps: float,
        state: Literal["fp32", "bf16"],
    ) -> None:
        self._betas, self._eps, self._state_format = betas, eps, state
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """Two moments."""
        narrow = torch.bfloat16 if self._state_format == "bf16" else None
        return {key: wide_zeros(shard).to(narrow) for key in ("exp_avg", "exp_avg_sq")}

    def update_all(self, parts: list[Part]) -> None:
        """Nothing is opened first: the pass reads and writes what is kept."""
        self.update(parts)

    def update(self, parts: list[Part]) -> None:
        """One pass per parameter."""
        numbers: dict[tuple[float, float], Numbers] = {}
        keys: dict[torch.device, Tensor] = {}
        for part in parts:
            device, rates = part.shard.device, (part.lr, part.weight_decay)
            if not part.shard.numel():
                continue
            if rates not in numbers:
                numbers[rates] = self._numbers(*rates, device)
            if device not in keys:
                keys[device] = step_key(self.num_updates, device)
            _pass_on(device)(*_as_rows(part), numbers[rates], self.grid(part), keys[device])

    def _numbers(self, lr: float, decay: float, device: torch.device) -> Numbers:
        beta1, beta2 = self._betas
        plain = Numbers(
            keep=1.0 - lr * decay,
            rate=lr / (1.0 - beta1**self.num_updates),
            root=(1.0 - beta2**self.num_updates) ** 0.5,
            forget1=1.0 - beta1,
            beta2=beta2,
            forget2=1.0 - beta2,
            eps=self._eps,
        )
        if device.type == "cpu":
            return plain
        return Numbers(*(torch.full((), float(one), device=device) for one in plain))  # no host sync


def adamw_pass(
    kept: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Numbers,
    grid: NoiseGrid,
    key: Tensor,
) -> None:
    """Update a weight and its moments in place; all are [rows, columns], bf16 ones as int16 bits."""
    noise = draw(grid, key)
    weight = read(kept, lower)
    g = gradient.to(weight.dtype)
    m, v = read(first), read(second)
    m = m + numbers.forget1 * (g - m)
    v = v * numbers.beta2 + numbers.forget2 * g * g
    weight = weight * numbers.keep - numbers.rate * (m / (v.sqrt() / numbers.root + numbers.eps))
    write(m, first, None, noise.first)
    write(v, second, None, noise.second)
    write(weight, kept, lower, noise.weight)


def _as_rows(part: Part) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The tensors of a pass as [rows, columns] views."""
    state, columns = part.state, part.shard.shape[-1]
    kept, first, second = (
        bits_of(tensor).view(-1, columns) for tensor in (part.shard, state["exp_avg"], state["exp_avg_sq"])
    )
    lower = state[LOWER_BITS].view(-1, columns) if LOWER_BITS in state else None
    return kept, lower, part.gradient.reshape(-1, columns), first, second


def _pass_on(device: torch.device) -> Callable[..., None]:
    if is_stand_in():
        return lambda *_: None  # the compiled pass allocates nothing
    return adamw_pass if device.type == "cpu" else _compiled_pass()


@cache
def _compiled_pass() -> Callable[..., None]:
    return torch.compile(adamw_pass, dynamic=True, fullgraph=True)
