"""AdamW whose moments take one byte each: a code per element and a scale per block.

Blocks are runs of 256 along the last dim of the WHOLE parameter, row by row, so they do not depend on the
mesh: cuts of other dims keep blocks whole, and where the last dim is cut (the second matrix of a tp pair)
the ranks of a block agree on its largest value. Scales then lie whole on each of those ranks.

Codes are logarithmic below the largest value of the block: an octave has about 10 levels for the second
moment and 8 for the first. Nearest rounding would leave an average where it is, because one step changes
it by less than half a level; so rounding is random, right on average, with noise that any mesh draws alike.
Vectors keep exact moments: they are few, and every rank would have to agree on their blocks.

Where all blocks of a matrix are full and lie whole on a rank, an update is one pass (one kernel on CUDA).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.optim.clip import multiply
from meshwright.optim.full_parameter import Whole, reduce_together
from meshwright.optim.fused import Numbers, UpdateNumbers, fused, moved_moments, moved_weight
from meshwright.optim.rounding import bits_of, read, write
from meshwright.optim.rounding_noise import NOISE_LEVELS, NoiseGrid, draw, step_key
from meshwright.optim.sharded import (
    LOWER_BITS,
    Part,
    ShardedOptimizer,
    Shards,
    adam_directions,
    step_along,
    wide_zeros,
)

BLOCK = 256
# (largest code, octaves that the codes span). Smaller first moments round to zero or to the smallest level;
# a second moment never rounds to zero, because the first is divided by its root.
FIRST = (127, 16.0)
SECOND = (255, 24.0)


class Adam8Bit(ShardedOptimizer):
    """AdamW with one byte per moment for matrices."""

    takes_factor = True

    def __init__(
        self,
        shards: Shards,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """Codes and scales of zeros; a vector's moments as they are."""
        if shard.ndim < 2:
            return {"exp_avg": wide_zeros(shard), "exp_avg_sq": wide_zeros(shard)}
        scales = shard.new_zeros((*shard.shape[:-1], -(-whole.shape[-1] // BLOCK)), dtype=torch.float32)
        return {
            "exp_avg_code": torch.zeros_like(shard, dtype=torch.int8),
            "exp_avg_scale": scales,
            "exp_avg_sq_code": torch.zeros_like(shard, dtype=torch.uint8),
            "exp_avg_sq_scale": scales.clone(),
        }

    def update_all(self, parts: list[Part]) -> None:
        """Matrices whose blocks all lie whole on this rank in one pass each; the others step by step."""
        aligned = [part for part in parts if _has_whole_blocks(part)]
        numbers = UpdateNumbers(self._betas, self._eps, self.num_updates, self.gradient_factor)
        with fused(blockwise_pass, aligned, self.simulated) as one_pass:
            for part in aligned:
                if part.shard.numel():
                    one_pass(*_as_blocks(part), numbers.of(part), self.grid(part), numbers.key(part))
        others = [part for part in parts if not _has_whole_blocks(part)]
        if isinstance(self.gradient_factor, Tensor):
            multiply([part.gradient for part in others], self.gradient_factor)
        super().update_all(others)

    def update(self, parts: list[Part]) -> None:
        """Parameter by parameter, so that the moments of only one are ever decoded."""
        vectors = [part for part in parts if "exp_avg_code" not in part.state]
        step_along(vectors, self._directions(vectors), has_decay=True)
        for part in parts:
            if "exp_avg_code" in part.state:
                step_along([part], [self._coded(part)], has_decay=True)

    def _directions(self, parts: list[Part]) -> list[Tensor]:
        return adam_directions(parts, betas=self._betas, eps=self._eps, num_updates=self.num_updates)

    def _coded(self, part: Part) -> Tensor:
        first, second = (decoded(part.state, key, part.whole, part.gradient.dtype) for key in _LEVELS)
        (along,) = self._directions([part._replace(state={"exp_avg": first, "exp_avg_sq": second})])
        axes = part.whole.axes(-1)
        scales = reduce_together(
            [(block_maxima(moment, part.whole), axes) for moment in (first, second)], dist.ReduceOp.MAX
        )
        noise = draw(self.grid(part), step_key(self.num_updates, part.gradient.device))
        for key, moment, scale, drawn in zip(_LEVELS, (first, second), scales, noise[1:], strict=True):
            part.state[f"{key}_scale"].copy_(scale)
            chance = drawn.view_as(moment) * (1.0 / NOISE_LEVELS)
            spread = _spread(part.state[f"{key}_scale"], part.whole, moment.dtype)
            part.state[f"{key}_code"].copy_(_code(moment, spread, key, chance))
        return along


_LEVELS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}


def _has_whole_blocks(part: Part) -> bool:
    whole = part.whole
    return len(whole.shape) >= 2 and not whole.axes(-1) and whole.shape[-1] % BLOCK == 0


class Coded(NamedTuple):
    """Codes [rows, blocks, BLOCK] and scales [rows, blocks, 1] of one moment."""

    code: Tensor
    scale: Tensor


def _as_blocks(part: Part) -> tuple[Tensor, Tensor | None, Tensor, Coded, Coded]:
    """The tensors of a pass as [rows, blocks, BLOCK] views."""
    state, blocks = part.state, part.whole.shape[-1] // BLOCK
    lower = state.get(LOWER_BITS)
    first, second = (
        Coded(state[f"{key}_code"].view(-1, blocks, BLOCK), state[f"{key}_scale"].view(-1, blocks, 1))
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
    kept: Tensor,
    lower: Tensor | None,
    gradient: Tensor,
    first: Coded,
    second: Coded,
    numbers: Numbers,
    grid: NoiseGrid,
    key: Tensor,
) -> None:
    """Decode, update and code again, block by block, in place; bf16 weights are int16 bits."""
    # Tells the compiler, which takes sizes for unknown, that a block fits in registers. One of unknown size
    # it walks over several times, with 6 bytes of every element in memory between.
    assert gradient.shape[-1] == BLOCK
    noise = [one.view(gradient.shape) for one in draw(grid, key)]
    weight = read(kept, lower)
    known = [
        _value(one.code.to(weight.dtype), one.scale.to(weight.dtype), name)
        for name, one in zip(_LEVELS, (first, second), strict=True)
    ]
    moments = moved_moments(known[0], known[1], gradient.to(weight.dtype), numbers)
    write(moved_weight(weight, *moments, numbers), kept, lower, noise[0])
    for name, moment, coded, drawn in zip(_LEVELS, moments, (first, second), noise[1:], strict=True):
        largest = moment.abs().amax(-1, keepdim=True).to(torch.float32)
        coded.code.copy_(_code(moment, largest.to(moment.dtype), name, drawn * (1.0 / NOISE_LEVELS)))
        coded.scale.copy_(largest)


def block_maxima(moment: Tensor, whole: Whole) -> Tensor:
    """Largest magnitude of each block [..., blocks of the whole last dim]; 0 for blocks elsewhere."""
    last = whole.box[-1]
    before, after = last.start % BLOCK, -last.stop % BLOCK
    maxima = moment.new_zeros((*moment.shape[:-1], -(-whole.shape[-1] // BLOCK)), dtype=torch.float32)
    if moment.numel():
        padded = nn.functional.pad(moment.abs(), (before, after))
        here = padded.unflatten(-1, (-1, BLOCK)).amax(-1)
        maxima[..., last.start // BLOCK : last.start // BLOCK + here.shape[-1]] = here
    return maxima


def decoded(state: Mapping[str, Tensor], key: str, whole: Whole, dtype: torch.dtype) -> Tensor:
    """A moment as numbers."""
    return _value(state[f"{key}_code"].to(dtype), _spread(state[f"{key}_scale"], whole, dtype), key)


def _value(code: Tensor, scale: Tensor, key: str) -> Tensor:
    return _level(code.abs(), _LEVELS[key]) * code.sign() * scale


def _level(code: Tensor, levels: tuple[int, float]) -> Tensor:
    """Part of the block's largest value that a code stands for; code 0 is zero."""
    largest, octaves = levels
    return torch.where(code > 0, torch.exp2((code - largest) * (octaves / (largest - 1))), 0.0)


def _code(moment: Tensor, scale: Tensor, key: str, noise: Tensor) -> Tensor:
    """One of the two neighbouring codes, the nearer one more often; noise lies in [0, 1)."""
    largest, octaves = _LEVELS[key]
    part = torch.where(scale > 0, moment.abs() / scale, 0.0)
    place = largest + torch.log2(part) * ((largest - 1) / octaves)
    lower = place.floor().clamp(0, largest - 1)
    below, above = _level(lower, _LEVELS[key]), _level(lower + 1, _LEVELS[key])
    code = lower + (noise * (above - below) < part - below)
    if key == "exp_avg_sq":
        code = torch.where(part > 0, code.clamp(min=1), 0.0)
    return code * moment.sign()


def _spread(scales: Tensor, whole: Whole, dtype: torch.dtype) -> Tensor:
    """The scale of each element of the shard."""
    last = whole.box[-1]
    block = torch.arange(last.start, last.stop, device=scales.device) // BLOCK
    return scales.to(dtype).index_select(-1, block)
