"""How far the weights of two runs are apart."""

import math
from pathlib import Path

import torch

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.errors import CheckpointError
from meshwright.models.names import state_shapes
from meshwright.observe.compare import Difference
from meshwright.train.weights import Weights, open_weights


def weight_difference(run_a: Path, run_b: Path, *, max_step: int | None, rtol: float) -> Difference | None:
    """At the last step of which both runs have a checkpoint; None where there is no such step."""
    shared = _steps(run_a) & _steps(run_b)
    step = max((step for step in shared if max_step is None or step <= max_step), default=None)
    if step is None:
        return None
    a, b = open_weights(run_a, step=step), open_weights(run_b, step=step)
    if state_shapes(a.model) != state_shapes(b.model):
        raise CheckpointError(
            "the runs have different models, so their weights cannot be compared",
            where=f"{run_a} and {run_b}",
            hint="leave them out: --no-weights",
        )
    return compare_weights(a, b, name=f"weights at step {step}", rtol=rtol)


def compare_weights(a: Weights, b: Weights, *, name: str, rtol: float) -> Difference:
    """Tensor by tensor: the largest |a - b| / the largest |a| or |b| of that tensor."""
    apart = [_apart(a.tensors[tensor], b.tensors[tensor]) for tensor in a.tensors]
    return Difference(
        name=name,
        num_compared=len(apart),
        num_different=sum(relative > rtol for relative in apart),
        first_different=None,
        max_relative=max(apart),
        max_relative_at=None,
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    size = torch.maximum(a.abs().max(), b.abs().max()).double()
    relative = float((a.double() - b.double()).abs().max() / size)
    return relative if math.isfinite(relative) else math.inf


def _steps(run: Path) -> set[int]:
    return {int(folder.name.removeprefix("step-")) for folder in complete_checkpoints(run / "checkpoints")}
