"""AdamW whose moments take one byte each: a code per element and a scale per block.

Blocks are runs of 256 along the last dim of the WHOLE parameter, row by row, so they do not depend on the
mesh: cuts of other dims keep blocks whole, and where the last dim is cut (the second matrix of a tp pair)
the ranks of a block agree on its largest value. Scales then lie whole on each of those ranks.

Codes are logarithmic below the largest value of the block: an octave has about 10 levels for the second
moment and 8 for the first. Nearest rounding would leave an average where it is, because one step changes
it by less than half a level; so rounding is random, right on average, with noise that any mesh draws alike.
Vectors keep exact moments: they are few, and every rank would have to agree on their blocks.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.optim.noise import NOISE_LEVELS, draw, step_key
from meshwright.optim.sharded import Part, ShardedOptimizer, Shards, adam_direction, blend, wide_zeros
from meshwright.optim.whole import Whole, reduce_together

BLOCK = 256
# (largest code, octaves that the codes span). Smaller first moments round to zero or to the smallest level;
# a second moment never rounds to zero, because the first is divided by its root.
FIRST = (127, 16.0)
SECOND = (255, 24.0)


class Adam8Bit(ShardedOptimizer):
    """AdamW with one byte per moment for matrices."""

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

    def update(self, parts: list[Part]) -> None:
        """Parameter by parameter, so that the moments of only one are ever decoded."""
        for part in parts:
            along = self._coded(part) if "exp_avg_code" in part.state else self._exact(part)
            part.shard.mul_(1.0 - part.lr * part.weight_decay).add_(along, alpha=-part.lr)

    def _exact(self, part: Part) -> Tensor:
        first = blend(part.state["exp_avg"], part.gradient, self._betas[0])
        second = blend(part.state["exp_avg_sq"], part.gradient.square(), self._betas[1])
        return self._direction(first, second)

    def _coded(self, part: Part) -> Tensor:
        moments = [decoded(part.state, key, part.whole, part.gradient.dtype) for key in _LEVELS]
        first = blend(moments[0], part.gradient, self._betas[0])
        second = blend(moments[1], part.gradient.square(), self._betas[1])
        axes = part.whole.axes(-1)
        scales = reduce_together(
            [(block_maxima(moment, part.whole), axes) for moment in (first, second)], dist.ReduceOp.MAX
        )
        noise = draw(self.grid(part), step_key(self.num_updates, part.gradient.device))
        for key, moment, scale, drawn in zip(_LEVELS, (first, second), scales, noise[1:], strict=True):
            part.state[f"{key}_scale"].copy_(scale)
            chance = drawn.view_as(moment) * (1.0 / NOISE_LEVELS)
            part.state[f"{key}_code"].copy_(_code(moment, part.state, key, part.whole, chance))
        return self._direction(first, second)

    def _direction(self, first: Tensor, second: Tensor) -> Tensor:
        return adam_direction(first, second, betas=self._betas, eps=self._eps, num_updates=self.num_updates)


_LEVELS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}


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
    code = state[f"{key}_code"].to(dtype)
    return _level(code.abs(), _LEVELS[key]) * code.sign() * _spread(state[f"{key}_scale"], whole, dtype)


def _level(code: Tensor, levels: tuple[int, float]) -> Tensor:
    """Part of the block's largest value that a code stands for; code 0 is zero."""
    largest, octaves = levels
    return torch.where(code > 0, torch.exp2((code - largest) * (octaves / (largest - 1))), 0.0)


def _code(moment: Tensor, state: Mapping[str, Tensor], key: str, whole: Whole, noise: Tensor) -> Tensor:
    """One of the two neighbouring codes, the nearer one more often."""
    largest, octaves = _LEVELS[key]
    scale = _spread(state[f"{key}_scale"], whole, moment.dtype)
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
