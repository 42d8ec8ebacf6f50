"""AdamW whose moments take one byte each: a code per element and a scale per block.

Blocks are runs of 256 along the last dim of the FULL parameter, row by row, so they do not depend on the
mesh. Sharding of other dims leaves blocks intact. Where the last dim is sharded (the second matrix of a tp
pair), the amax of a block is all-reduced over its ranks, and each of them stores all scales.

Codes are logarithmic below the amax of the block: an octave has about 10 levels for the second moment and 8
for the first. Rounding to nearest would never change an average, because one step moves it by less than half
a level; so rounding is stochastic, unbiased, with noise that is the same on any mesh. Vectors have exact
moments: they are few, and their blocks would need an all-reduce on every rank.

Where a matrix has only full blocks, and none is split between ranks, an update is one pass (one kernel on
CUDA).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.optim.clip import scale_gradients
from meshwright.optim.full_parameter import FullParameter, all_reduce_together
from meshwright.optim.fused import AdamScalarCache, AdamScalars, fused_kernel, updated_moments, updated_weight
from meshwright.optim.rounding import bits_of, read, write
from meshwright.optim.rounding_noise import NOISE_LEVELS, NoiseGrid, draw, step_key
from meshwright.optim.sharded import (
    LOWER_BITS,
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    adam_directions,
    apply_directions,
    state_zeros,
)

BLOCK = 256
# (largest code, octaves of the codes). Smaller first moments round to zero or to the smallest level; a second
# moment never rounds to zero, because the first is divided by its root.
FIRST = (127, 16.0)
SECOND = (255, 24.0)


class Adam8Bit(ShardedOptimizer):
    """8-bit AdamW: one byte per moment for matrices."""

    applies_gradient_scale = True

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """Codes and scales of zero moments; exact moments for a vector."""
        if shard.ndim < 2:
            return {"exp_avg": state_zeros(shard), "exp_avg_sq": state_zeros(shard)}
        scales = shard.new_zeros((*shard.shape[:-1], -(-full.shape[-1] // BLOCK)), dtype=torch.float32)
        return {
            "exp_avg_code": torch.zeros_like(shard, dtype=torch.int8),
            "exp_avg_scale": scales,
            "exp_avg_sq_code": torch.zeros_like(shard, dtype=torch.uint8),
            "exp_avg_sq_scale": scales.clone(),
        }

    def update_all(self, parts: list[ShardUpdate]) -> None:
        """Update matrices whose blocks are all full and local in one pass each, the others in steps."""
        aligned = [part for part in parts if _has_full_blocks(part)]
        scalars = AdamScalarCache(self._betas, self._eps, self.num_updates, self.gradient_scale)
        with fused_kernel(blockwise_pass, aligned, self.simulated) as update:
            for part in aligned:
                if part.shard.numel():
                    update(*_as_blocks(part), scalars.of(part), self.grid(part), scalars.key(part))
        others = [part for part in parts if not _has_full_blocks(part)]
        if isinstance(self.gradient_scale, Tensor):
            scale_gradients([part.gradient for part in others], self.gradient_scale)
        super().update_all(others)

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update one matrix at a time, so that the moments of only one are ever dequantised."""
        vectors = [part for part in parts if "exp_avg_code" not in part.state]
        apply_directions(vectors, self._directions(vectors), has_decay=True)
        for part in parts:
            if "exp_avg_code" in part.state:
                apply_directions([part], [self._update_quantised(part)], has_decay=True)

    def _directions(self, parts: list[ShardUpdate]) -> list[Tensor]:
        return adam_directions(parts, betas=self._betas, eps=self._eps, num_updates=self.num_updates)

    def _update_quantised(self, part: ShardUpdate) -> Tensor:
        first, second = (dequantise(part.state, key, part.full, part.gradient.dtype) for key in _LEVELS)
        (direction,) = self._directions([part._replace(state={"exp_avg": first, "exp_avg_sq": second})])
        axes = part.full.axes(-1)
        scales = all_reduce_together(
            [(block_amax(moment, part.full), axes) for moment in (first, second)], dist.ReduceOp.MAX
        )
        noise = draw(self.grid(part), step_key(self.num_updates, part.gradient.device))
        for key, moment, scale, drawn in zip(_LEVELS, (first, second), scales, noise[1:], strict=True):
            part.state[f"{key}_scale"].copy_(scale)
            fraction = drawn.view_as(moment) * (1.0 / NOISE_LEVELS)
            scale_of = _scale_per_element(part.state[f"{key}_scale"], part.full, moment.dtype)
            part.state[f"{key}_code"].copy_(_quantise_to_code(moment, scale_of, key, fraction))
        return direction


_LEVELS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}


def _has_full_blocks(part: ShardUpdate) -> bool:
    full = part.full
    return len(full.shape) >= 2 and not full.axes(-1) and full.shape[-1] % BLOCK == 0


class QuantisedMoment(NamedTuple):
    """Codes [rows, blocks, BLOCK] and scales [rows, blocks, 1] of one moment."""

    code: Tensor
    scale: Tensor


def _as_blocks(part: ShardUpdate) -> tuple[Tensor, Tensor | None, Tensor, QuantisedMoment, QuantisedMoment]:
    """The tensors of a pass as [rows, blocks, BLOCK] views."""
    state, blocks = part.state, part.full.shape[-1] // BLOCK
    lower = state.get(LOWER_BITS)
    first, second = (
        QuantisedMoment(
            state[f"{key}_code"].view(-1, blocks, BLOCK), state[f"{key}_scale"].view(-1, blocks, 1)
        )
        for key in _LEVELS
    )
    return (
        bits_of(part.shard).view(-1, blocks, BLOCK),
        None if lower is None else lower.view(-1, blocks, BLOCK),
        part.gradient.reshape(-1, blocks, BLOCK),
        first,
        second,
    )


def blockwise_pass(
    stored: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: QuantisedMoment,
    second: QuantisedMoment,
    scalars: AdamScalars,
    grid: NoiseGrid,
    key: Tensor,
) -> None:
    """Dequantise, update and quantise in place, block by block; bf16 weights are int16 bits."""
    # Tells the compiler, for which sizes are dynamic, that a block fits in registers. Over a block of unknown
    # size it makes several passes, with 6 bytes per element in memory between them.
    assert gradient.shape[-1] == BLOCK
    noise = [one.view(gradient.shape) for one in draw(grid, key)]
    weight = read(stored, lower)
    old = [
        _dequantised(one.code.to(weight.dtype), one.scale.to(weight.dtype), name)
        for name, one in zip(_LEVELS, (first, second), strict=True)
    ]
    moments = updated_moments(old[0], old[1], gradient.to(weight.dtype), scalars)
    write(updated_weight(weight, *moments, scalars), stored, lower, noise[0])
    for name, moment, quantised, drawn in zip(_LEVELS, moments, (first, second), noise[1:], strict=True):
        amax = moment.abs().amax(-1, keepdim=True).to(torch.float32)
        fraction = drawn * (1.0 / NOISE_LEVELS)
        quantised.code.copy_(_quantise_to_code(moment, amax.to(moment.dtype), name, fraction))
        quantised.scale.copy_(amax)


def block_amax(moment: Tensor, full: FullParameter) -> Tensor:
    """The amax of each block [..., blocks of the full last dim]; 0 for blocks of other ranks."""
    last = full.local_slices[-1]
    before, after = last.start % BLOCK, -last.stop % BLOCK
    maxima = moment.new_zeros((*moment.shape[:-1], -(-full.shape[-1] // BLOCK)), dtype=torch.float32)
    if moment.numel():
        padded = nn.functional.pad(moment.abs(), (before, after))
        local = padded.unflatten(-1, (-1, BLOCK)).amax(-1)
        maxima[..., last.start // BLOCK : last.start // BLOCK + local.shape[-1]] = local
    return maxima


def dequantise(state: Mapping[str, Tensor], key: str, full: FullParameter, dtype: torch.dtype) -> Tensor:
    """A moment in `dtype`."""
    return _dequantised(
        state[f"{key}_code"].to(dtype), _scale_per_element(state[f"{key}_scale"], full, dtype), key
    )


def _dequantised(code: Tensor, scale: Tensor, key: str) -> Tensor:
    return _level(code.abs(), _LEVELS[key]) * code.sign() * scale


def _level(code: Tensor, levels: tuple[int, float]) -> Tensor:
    """The value of a code as a fraction of the block's amax; code 0 is zero."""
    largest, octaves = levels
    return torch.where(code > 0, torch.exp2((code - largest) * (octaves / (largest - 1))), 0.0)


def _quantise_to_code(moment: Tensor, scale: Tensor, key: str, noise: Tensor) -> Tensor:
    """Stochastic rounding to one of the two neighbouring codes; noise is in [0, 1)."""
    largest, octaves = _LEVELS[key]
    value = torch.where(scale > 0, moment.abs() / scale, 0.0)
    position = largest + torch.log2(value) * ((largest - 1) / octaves)
    lower = position.floor().clamp(0, largest - 1)
    below, above = _level(lower, _LEVELS[key]), _level(lower + 1, _LEVELS[key])
    code = lower + (noise * (above - below) < value - below)
    if key == "exp_avg_sq":
        code = torch.where(value > 0, code.clamp(min=1), 0.0)
    return code * moment.sign()


def _scale_per_element(scales: Tensor, full: FullParameter, dtype: torch.dtype) -> Tensor:
    """The scale of each element of the shard."""
    last = full.local_slices[-1]
    block = torch.arange(last.start, last.stop, device=scales.device) // BLOCK
    return scales.to(dtype).index_select(-1, block)
