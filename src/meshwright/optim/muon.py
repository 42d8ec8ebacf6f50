"""Muon: each matrix steps along the nearest orthogonal matrix of its momentum.

    m <- momentum x m + g,   o = orthogonal(g + momentum x m)
    w <- w - lr x (0.2 sqrt(max(rows, columns)) x o + decay x w)

Orthogonalising needs the full matrix: it is all-gathered over the axes that shard it, and every rank keeps
its shard of the result. The factor gives steps of the size of AdamW's, so one learning rate and one weight
decay serve both. Embeddings, head and vectors are updated by AdamW. Stacked experts are orthogonalised one by
one.
"""

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.ops import torch_foreach as foreach
from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.sharded import (
    OptimizerShards,
    ShardedOptimizer,
    ShardUpdate,
    adam_directions,
    apply_directions,
    state_zeros,
)

NUM_ITERATIONS = 5
# Coefficients of the odd polynomial x -> a x + b x^3 + c x^5 that raises small singular values fastest
# (Jordan 2024). The results are between about 0.7 and 1.2, which is orthogonal enough.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
# Root mean square of a typical AdamW update (Liu et al. 2025).
ADAMW_SIZE = 0.2
_BY_ADAMW = ("embedding.", "head.")


def is_orthogonalised(name: str, shape: torch.Size) -> bool:
    """Whether a parameter is a matrix other than embedding and head."""
    return len(shape) >= 2 and not name.startswith(_BY_ADAMW)


def orthogonal(matrices: Tensor, simulated: SimulatedDevice | None = None) -> Tensor:
    """The orthogonal factor of each matrix [..., rows, columns], by Newton-Schulz iteration.

    On CUDA fp32 matrices are iterated in bf16: the iteration corrects rounding errors.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    on_cuda = kernel_device(matrices.device.type, simulated) == "cuda"
    dtype = torch.bfloat16 if on_cuda and matrices.dtype == torch.float32 else matrices.dtype
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-30)
    x = x.to(dtype)
    a, b, c = POLYNOMIAL
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(ShardedOptimizer):
    """Muon for matrices, AdamW for the rest."""

    def __init__(
        self,
        shards: OptimizerShards,
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._momentum, self._betas, self._eps = momentum, betas, eps
        super().__init__(shards)

    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """A momentum buffer for a matrix, two moments for the rest."""
        if is_orthogonalised(full.name, full.shape):
            return {"momentum_buffer": state_zeros(shard)}
        return {"exp_avg": state_zeros(shard), "exp_avg_sq": state_zeros(shard)}

    def update(self, parts: list[ShardUpdate]) -> None:
        """Update all shards; one all-gather per tensor whose matrices are sharded."""
        matrices = [part for part in parts if "momentum_buffer" in part.state]
        apply_directions(matrices, self._orthogonal_directions(matrices), has_decay=True)
        others = [part for part in parts if "momentum_buffer" not in part.state]
        directions = adam_directions(others, betas=self._betas, eps=self._eps, num_updates=self.num_updates)
        apply_directions(others, directions, has_decay=True)

    def _orthogonal_directions(self, parts: list[ShardUpdate]) -> list[Tensor]:
        """The direction of each shard; full matrices of one shape are orthogonalised in one batch."""
        if not parts:
            return []
        gradients = [part.gradient for part in parts]
        buffers = [part.state["momentum_buffer"] for part in parts]
        foreach.mul_(buffers, self._momentum)
        foreach.add_(buffers, gradients)
        ahead = foreach.add(gradients, buffers, alpha=self._momentum)
        gathered = [_with_full_matrices(part, one) for part, one in zip(parts, ahead, strict=True)]
        orthogonalised = orthogonal_together(gathered, self.simulated)
        pairs = zip(parts, orthogonalised, strict=True)
        return [
            (one[part.full.local_slices] if part.full.axes(-2, -1) else one)
            * (ADAMW_SIZE * max(part.full.shape[-2:]) ** 0.5)
            for part, one in pairs
        ]


def _with_full_matrices(part: ShardUpdate, ahead: Tensor) -> Tensor:
    """As it is where this rank has full matrices (all of them, or its experts), else all-gathered."""
    return part.full.gather(ahead) if part.full.axes(-2, -1) else ahead


def orthogonal_together(tensors: list[Tensor], simulated: SimulatedDevice | None = None) -> list[Tensor]:
    """The orthogonal factor of each matrix of each tensor, equal shapes in one batch."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_shape.setdefault(tensor.shape[-2:], []).append(index)
    results = list(tensors)
    for shape, indices in by_shape.items():
        counts = [tensors[index].shape[:-2].numel() for index in indices]
        pairs = zip(indices, counts, strict=True)
        batch = torch.cat([tensors[index].reshape(count, *shape) for index, count in pairs])
        for index, part in zip(indices, orthogonal(batch, simulated).split(counts), strict=True):
            results[index] = part.view(tensors[index].shape)
    return results
