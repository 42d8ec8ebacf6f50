"""Relative errors between training on several ranks and on one device, by quantity."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from meshwright.rehearse.steps import Trained

# float64 carries 16 digits; sums in another order cost two or three of them, three steps one more.
RTOL = 1e-9
# A tensor that is zero but for rounding (the key bias of attention without rope) has no scale of its own;
# below this fraction of the largest tensor of its kind the error is relative to that fraction.
SMALLEST_SCALE = 1e-4


class Expected(Protocol):
    """The result of a few steps, which must be the same on every mesh."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ema: dict[str, Tensor]
    eval_loss: float


def merged(results: Sequence[Trained], choose: Callable[[Trained], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all pipeline stages in one mapping."""
    found: dict[str, Tensor] = {}
    for result in results:
        found |= choose(result)
    return found


def worst_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """max |a - b| / max |b| of each tensor by name; infinite where one is missing or has another shape."""
    largest = max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0)
    errors = dict.fromkeys(actual.keys() ^ expected.keys(), math.inf)
    for name in actual.keys() & expected.keys():
        ours, theirs = actual[name], expected[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            errors[name] = math.inf
            continue
        scale = max(float(theirs.abs().max()), SMALLEST_SCALE * largest)
        error = float((ours.double() - theirs.double()).abs().max()) / scale if scale else 0.0
        errors[name] = error if error == error else math.inf
    return errors


def training_errors(results: Sequence[Trained], expected: Expected) -> dict[str, float]:
    """The worst relative error of losses, gradients, weights, states and buffers, by name."""
    first, errors = results[0], {}
    for step in range(len(first.losses)):
        scalars = {
            "loss": (first.losses, expected.losses),
            "grad_norm": (first.grad_norms, expected.grad_norms),
        }
        for name, (ours, theirs) in scalars.items():
            errors[f"step {step} {name}"] = abs(ours[step] - theirs[step]) / abs(theirs[step])
        gradients = merged(results, lambda result, step=step: result.gradients[step])
        named = worst_errors(gradients, expected.gradients[step])
        errors |= {f"step {step} gradient {name}": error for name, error in named.items()}
    for kind in ("weights", "optimizer", "buffers"):
        named = worst_errors(
            merged(results, lambda result, kind=kind: getattr(result, kind)), getattr(expected, kind)
        )
        errors |= {f"{kind} {name}": error for name, error in named.items()}
    if first.ema:
        named = worst_errors(merged(results, lambda result: result.ema), expected.ema)
        errors |= {f"ema {name}": error for name, error in named.items()}
    errors["eval loss"] = abs(first.eval_loss - expected.eval_loss) / expected.eval_loss
    return errors


def disagreements(results: Sequence[Trained]) -> list[str]:
    """Quantities that must be bitwise equal on all ranks and are not."""
    first = results[0]
    found = [
        f"{name} of rank {result.rank} and of rank 0"
        for result in results[1:]
        for name in ("losses", "grad_norms", "sample_ids")
        if getattr(result, name) != getattr(first, name)
    ]
    digests: dict[tuple[int, str], set[str]] = {}
    for result in results:
        for name, digest in result.digests.items():
            digests.setdefault((result.stage, name), set()).add(digest)
    return found + [f"copies of {name}" for (_, name), seen in digests.items() if len(seen) > 1]
