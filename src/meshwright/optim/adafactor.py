"""Adafactor: the second moment of a matrix, factored into its row means and column means.

    R[i] = mean over j of g^2,   C[j] = mean over i of g^2,   v[i, j] = R[i] x C[j] / mean(R)
    u = g / sqrt(v),  scaled down to a root mean square of at most 1;   w <- w - lr x (m(u) + decay x w)

Means are over the full matrix: R is all-reduced over the axes that shard columns, C over those that shard
rows. The averages decay with beta2 = 1 - t^-0.8. Stacked experts are factored one by one; vectors have an
unfactored v. The learning rate is absolute, like AdamW's, not relative to the size of the weights.
"""

from torch import Tensor

from meshwright.ops import torch_foreach as foreach
from meshwright.optim.full_parameter import FullParameter, all_reduce_together, full_norms
from meshwright.optim.sharded import (
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    apply_directions,
    state_zeros,
    update_averages,
)

DECAY_EXPONENT = -0.8
# Added to squares, so that rows without gradient (tokens that did not occur) do not divide by zero.
SMALLEST_SQUARE = 1e-30


class Adafactor(ShardedOptimizer):
    """Adafactor (Shazeer and Stern 2018); with beta1 = 0 there is no first moment."""

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        beta1: float,
    ) -> None:
        self._beta1 = beta1
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """One value per row and per column, and the first moment where there is one."""
        first = {"exp_avg": state_zeros(shard)} if self._beta1 else {}
        if shard.ndim < 2:
            return first | {"exp_avg_sq": state_zeros(shard)}
        rows = state_zeros(shard, shard.shape[:-1])
        columns = state_zeros(shard, (*shard.shape[:-2], shard.shape[-1]))
        return first | {"row_mean_sq": rows, "column_mean_sq": columns}

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update all shards; three all-reduces per set of axes: row and column sums, mean(R), norms of u."""
        beta2 = 1.0 - self.num_updates**DECAY_EXPONENT
        self._average_squares(parts, beta2)
        updates = self._scaled_gradients(parts)
        norms = full_norms([(direction, part.full) for direction, part in zip(updates, parts, strict=True)])
        for part, direction, norm in zip(parts, updates, norms, strict=True):
            root_mean_square = norm / part.full.shape.numel() ** 0.5
            direction.div_(root_mean_square.clamp(min=1.0))
        if self._beta1:
            firsts = [part.state["exp_avg"] for part in parts]
            update_averages(firsts, updates, self._beta1)
            foreach.copy_(updates, firsts)
        apply_directions(parts, updates, has_decay=True)

    def _average_squares(self, parts: list[ShardUpdate], beta2: float) -> None:
        matrices = [part for part in parts if part.shard.ndim >= 2]
        sums = []
        for part in parts:
            square = part.gradient.square().add_(SMALLEST_SQUARE)
            if part.shard.ndim < 2:
                update_averages([part.state["exp_avg_sq"]], [square], beta2)
            else:
                sums += [(square.sum(-1), part.full.axes(-1)), (square.sum(-2), part.full.axes(-2))]
        reduced = all_reduce_together(sums)
        if not matrices:
            return
        for key, sums_of, dim in (("row_mean_sq", reduced[::2], -1), ("column_mean_sq", reduced[1::2], -2)):
            means = foreach.div(sums_of, [float(part.full.shape[dim]) for part in matrices])
            update_averages([part.state[key] for part in matrices], list(means), beta2)

    def _scaled_gradients(self, parts: list[ShardUpdate]) -> list[Tensor]:
        matrices = [part for part in parts if part.shard.ndim >= 2]
        totals = all_reduce_together(
            [(part.state["row_mean_sq"].sum(-1, keepdim=True), part.full.axes(-2)) for part in matrices]
        )
        means = {
            id(part.shard): total / part.full.shape[-2] for part, total in zip(matrices, totals, strict=True)
        }
        return [_scaled(part, means.get(id(part.shard))) for part in parts]


def _scaled(part: ShardUpdate, row_mean: Tensor | None) -> Tensor:
    """g / sqrt(v), divided by one factor of v after the other: their product may underflow."""
    if row_mean is None:
        return part.gradient / part.state["exp_avg_sq"].sqrt()
    rows = (part.state["row_mean_sq"] / row_mean).rsqrt().unsqueeze(-1)
    return part.gradient * rows * part.state["column_mean_sq"].rsqrt().unsqueeze(-2)
