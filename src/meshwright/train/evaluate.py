"""The loss on held-out sequences."""

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.data.batches import evaluation_batches
from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.precision.policy import full_precision_dtype
from meshwright.spec import RunSpec


def evaluate(
    run: RunSpec,
    program: Program,
    mesh: Mesh,
    *,
    every_sample: bool = False,
    reference: NDArray[np.float64] | None = None,
) -> float:
    """Sum over held-out target tokens / their number, equal for any layout. All ranks call it; host sync.

    `every_sample` evaluates all samples of the dataset instead of the held-out ones. On preference pairs it
    is the mean loss of a pair; `reference` has their reference log-probs.
    """
    if run.preference is not None and run.preference.has_reference and reference is None:
        raise DataError("the pairs have no reference log-probs", where="preference")
    batches = evaluation_batches(
        run.data,
        vocab_size=run.model.vocab_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.parallel.dp,
        device=mesh.device,
        dtype=full_precision_dtype(run.precision),
        every_sample=every_sample,
        reference=reference,
    )
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        total += program.evaluate(batch.microbatches)
    return float(sum_over_world(total, mesh))


def sum_over_world(part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of a loss over all ranks; tp ranks have the same tokens and count once. Communicates."""
    total = part.double().clone()
    dist.all_reduce(total)
    return total / mesh.parallel.tp
