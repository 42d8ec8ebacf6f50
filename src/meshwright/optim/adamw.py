"""AdamW with weights and moments in fp32 or bf16; on the CPU and all in fp32, torch's AdamW is used.

One pass over a shard reads weight, gradient and moments, updates them in fp32 and writes them back: on CUDA
with a Triton kernel, elsewhere with plain torch. Clipping is part of the pass. With torch's fused AdamW
clipping is a pass of its own over the gradients: on an H200, 32 ms instead of 21 for 3 billion parameters.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.fused import AdamScalarCache, AdamScalars, updated_moments, updated_weight
from meshwright.optim.rounding import bits_of, read, write
from meshwright.optim.rounding_noise import NoiseGrid, draw
from meshwright.optim.sharded import LOWER_BITS, OptimizerShards, ShardedOptimizer, ShardUpdate, state_zeros

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.optim.adamw_triton import adamw_kernel


class AdamW(ShardedOptimizer):
    """AdamW (Loshchilov and Hutter 2017), element by element."""

    applies_gradient_scale = True

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        betas: tuple[float, float],
        eps: float,
        state: Literal["fp32", "bf16"],
    ) -> None:
        self._betas, self._eps, self._state_format = betas, eps, state
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """Two moments of zeros."""
        zeros = state_zeros(shard).bfloat16() if self._state_format == "bf16" else state_zeros(shard)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update_all(self, parts: list[ShardUpdate]) -> None:
        """Update all shards as they are stored: the pass itself reads and writes bf16."""
        self.update(parts)

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update each shard in one pass."""
        scalars = AdamScalarCache(self._betas, self._eps, self.num_updates, self.gradient_scale)
        if self.simulated is not None:
            return  # the kernel allocates nothing
        for part in parts:
            if part.shard.numel():
                adamw, tensors = _kernel_for(part.shard), _as_rows(part)
                grid = self.grid(part) if _is_rounded(*tensors) else None
                adamw(*tensors, scalars.plain(part), grid, scalars.key(part))


def _kernel_for(shard: Tensor) -> Callable[..., None]:
    """The Triton kernel on CUDA; plain torch elsewhere and for float64."""
    return adamw_kernel if shard.is_cuda and shard.dtype != torch.float64 else adamw_pass


def _is_rounded(*tensors: Tensor | None) -> bool:
    """Whether a weight or a moment is stored in bf16, as int16 bits."""
    return any(one is not None and one.dtype == torch.int16 for one in tensors)


def adamw_pass(
    stored: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: AdamScalars,
    grid: NoiseGrid | None,
    key: Tensor,
) -> None:
    """Update a weight and its moments in place; all are [rows, columns], bf16 tensors as int16 bits.

    `grid` may be None where nothing is stored in bf16.
    """
    weight_noise, first_noise, second_noise = (None, None, None) if grid is None else draw(grid, key)
    weight = read(stored, lower)
    m, v = updated_moments(read(first), read(second), gradient.to(weight.dtype), scalars)
    weight = updated_weight(weight, m, v, scalars)
    write(m, first, None, first_noise)
    write(v, second, None, second_noise)
    write(weight, stored, lower, weight_noise)


def _as_rows(part: ShardUpdate) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The tensors of a pass as [rows, columns] views."""
    state, columns = part.state, part.shard.shape[-1]
    stored, first, second = (
        bits_of(tensor).view(-1, columns) for tensor in (part.shard, state["exp_avg"], state["exp_avg_sq"])
    )
    lower = state[LOWER_BITS].view(-1, columns) if LOWER_BITS in state else None
    return stored, lower, part.gradient.reshape(-1, columns).contiguous(), first, second
