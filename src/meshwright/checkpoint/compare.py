"""Differences between the weights of two runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.weights import saved_weights
from meshwright.errors import CheckpointError


@dataclass(frozen=True)
class WeightDifference:
    """Difference between the weights of two runs at a step that both have saved."""

    step: int
    num_tensors: int
    num_different: int
    max_relative: float
    """The largest |a - b| / the largest |a| or |b| of a tensor, over all tensors."""


def weight_difference(
    run_a: Path, run_b: Path, *, max_step: int | None, rtol: float
) -> WeightDifference | None:
    """The difference at the last step that both runs have saved; None where there is no such step."""
    shared = _steps(run_a) & _steps(run_b)
    step = max((step for step in shared if max_step is None or step <= max_step), default=None)
    if step is None:
        return None
    a, b = saved_weights(run_a, step=step), saved_weights(run_b, step=step)
    if a.shapes() != b.shapes():
        raise CheckpointError(
            "the runs have different models, so their weights cannot be compared",
            where=f"{run_a} and {run_b}",
            hint="leave them out: --no-weights",
        )
    return compare_weights(a, b, step=step, rtol=rtol)


def compare_weights(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, step: int, rtol: float
) -> WeightDifference:
    """The difference of two sets of weights, tensor by tensor."""
    relative = [_relative(a[tensor], b[tensor]) for tensor in a]
    return WeightDifference(
        step=step,
        num_tensors=len(relative),
        num_different=sum(one > rtol for one in relative),
        max_relative=max(relative),
    )


def _relative(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    size = torch.maximum(a.abs().max(), b.abs().max()).double()
    relative = float((a.double() - b.double()).abs().max() / size)
    return relative if math.isfinite(relative) else math.inf


def _steps(run: Path) -> set[int]:
    return {int(folder.name.removeprefix("step-")) for folder in complete_checkpoints(run / "checkpoints")}
