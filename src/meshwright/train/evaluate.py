"""Loss on the held-out sequences."""

import torch
import torch.distributed as dist

from meshwright.data.batches import evaluation_batches
from meshwright.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.precision.policy import wide_dtype
from meshwright.spec import RunSpec


def evaluate(run: RunSpec, program: Program, mesh: Mesh) -> float:
    """Sum over held-out target tokens / their number: the same for any cut. All ranks call it; host sync."""
    batches = evaluation_batches(
        run.data,
        vocab_size=run.model.vocab_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.parallel.dp,
        device=mesh.device,
        dtype=wide_dtype(run.precision),
    )
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        total += program.evaluate(batch.microbatches)
    return float(sum_over_world(total, mesh))


def sum_over_world(part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The loss from every rank's part of it: tp ranks hold the same tokens and count once."""
    total = part.double().clone()
    dist.all_reduce(total)
    return total / mesh.parallel.tp
