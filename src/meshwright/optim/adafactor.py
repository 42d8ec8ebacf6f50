"""Adafactor: the second moment of a matrix as the product of its row means and column means.

    R[i] = mean over j of g^2,   C[j] = mean over i of g^2,   v[i, j] = R[i] x C[j] / mean(R)
    u = g / sqrt(v),  scaled down to a root mean square of at most 1;   w <- w - lr x (m(u) + decay x w)

Means are of the whole matrix: R is summed over the axes that cut columns, C over those that cut rows. The
averages forget as 1 - t^-0.8 does. Stacked experts are factored one by one; vectors keep v as it is. The
rate is used as written, like AdamW's, not relative to the size of the weights.
"""

import torch
from torch import Tensor

from meshwright.optim.full_parameter import Whole, reduce_together, whole_norms
from meshwright.optim.sharded import Part, ShardedOptimizer, Shards, blend, step_along, wide_zeros

DECAY_EXPONENT = -0.8
# Added to squares, so that rows without any gradient (tokens that did not occur) divide by something.
SMALLEST_SQUARE = 1e-30


class Adafactor(ShardedOptimizer):
    """Shazeer and Stern 2018; beta1 = 0 keeps no first moment."""

    def __init__(
        self,
        shards: Shards,
        *,
        beta1: float,
    ) -> None:
        self._beta1 = beta1
        super().__init__(shards)

    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """A number per row and per column, and the first moment where there is one."""
        first = {"exp_avg": wide_zeros(shard)} if self._beta1 else {}
        if shard.ndim < 2:
            return first | {"exp_avg_sq": wide_zeros(shard)}
        rows = wide_zeros(shard, shard.shape[:-1])
        columns = wide_zeros(shard, (*shard.shape[:-2], shard.shape[-1]))
        return first | {"row_mean_sq": rows, "column_mean_sq": columns}

    def update(self, parts: list[Part]) -> None:
        """See above; three all-reduces per set of axes: row and column sums, mean(R), norms of u."""
        beta2 = 1.0 - self.num_updates**DECAY_EXPONENT
        self._average_squares(parts, beta2)
        updates = self._scaled_gradients(parts)
        norms = whole_norms([(along, part.whole) for along, part in zip(updates, parts, strict=True)])
        for part, along, norm in zip(parts, updates, norms, strict=True):
            root_mean_square = norm / part.whole.shape.numel() ** 0.5
            along.div_(root_mean_square.clamp(min=1.0))
        if self._beta1:
            firsts = [part.state["exp_avg"] for part in parts]
            blend(firsts, updates, self._beta1)
            torch._foreach_copy_(updates, firsts)
        step_along(parts, updates, has_decay=True)

    def _average_squares(self, parts: list[Part], beta2: float) -> None:
        matrices = [part for part in parts if part.shard.ndim >= 2]
        sums = []
        for part in parts:
            square = part.gradient.square().add_(SMALLEST_SQUARE)
            if part.shard.ndim < 2:
                blend([part.state["exp_avg_sq"]], [square], beta2)
            else:
                sums += [(square.sum(-1), part.whole.axes(-1)), (square.sum(-2), part.whole.axes(-2))]
        reduced = reduce_together(sums)
        if not matrices:
            return
        for key, sums_of, dim in (("row_mean_sq", reduced[::2], -1), ("column_mean_sq", reduced[1::2], -2)):
            means = torch._foreach_div(sums_of, [float(part.whole.shape[dim]) for part in matrices])
            blend([part.state[key] for part in matrices], list(means), beta2)

    def _scaled_gradients(self, parts: list[Part]) -> list[Tensor]:
        matrices = [part for part in parts if part.shard.ndim >= 2]
        totals = reduce_together(
            [(part.state["row_mean_sq"].sum(-1, keepdim=True), part.whole.axes(-2)) for part in matrices]
        )
        means = {
            id(part.shard): total / part.whole.shape[-2] for part, total in zip(matrices, totals, strict=True)
        }
        return [_scaled(part, means.get(id(part.shard))) for part in parts]


def _scaled(part: Part, row_mean: Tensor | None) -> Tensor:
    """g / sqrt(v), the two factors of v taken one after the other: their product may underflow."""
    if row_mean is None:
        return part.gradient / part.state["exp_avg_sq"].sqrt()
    rows = (part.state["row_mean_sq"] / row_mean).rsqrt().unsqueeze(-1)
    return part.gradient * rows * part.state["column_mean_sq"].rsqrt().unsqueeze(-2)
