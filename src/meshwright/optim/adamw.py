"""AdamW for weights or moments kept in bf16; in fp32 torch's own is used.

One pass over a shard reads weight, gradient and moments, updates them in fp32 and writes them back: on CUDA
it is one kernel of ours, elsewhere plain torch.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole
from meshwright.optim.fused import Numbers, UpdateNumbers, moved_moments, moved_weight
from meshwright.optim.rounding import bits_of, read, write
from meshwright.optim.rounding_noise import NoiseGrid, draw
from meshwright.optim.sharded import LOWER_BITS, Part, ShardedOptimizer, Shards, wide_zeros

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.optim.adamw_triton import adamw_kernel


class AdamW(ShardedOptimizer):
    """Loshchilov and Hutter 2017, element by element."""

    takes_factor = True

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
        zeros = wide_zeros(shard).bfloat16() if self._state_format == "bf16" else wide_zeros(shard)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update_all(self, parts: list[Part]) -> None:
        """Nothing is opened first: the pass reads and writes what is kept."""
        self.update(parts)

    def update(self, parts: list[Part]) -> None:
        """One pass per parameter."""
        numbers = UpdateNumbers(self._betas, self._eps, self.num_updates, self.gradient_factor)
        if self.simulated is not None:
            return  # the kernel allocates nothing
        for part in parts:
            if part.shard.numel():
                one_pass = _pass_for(part.shard)
                one_pass(*_as_rows(part), numbers.plain(part), self.grid(part), numbers.key(part))


def _pass_for(shard: Tensor) -> Callable[..., None]:
    """Proofs in float64 are plain everywhere."""
    return adamw_kernel if shard.is_cuda and shard.dtype != torch.float64 else adamw_pass


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
    m, v = moved_moments(read(first), read(second), gradient.to(weight.dtype), numbers)
    weight = moved_weight(weight, m, v, numbers)
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
    return kept, lower, part.gradient.reshape(-1, columns).contiguous(), first, second
