"""The ablation ladder of our own step: each rung is what one technique adds to the rungs below it.

A rung is taken away by undoing it from outside, for a measurement only: the product has no such switches.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.models import decoder
from meshwright.spec import RunSpec
from meshwright.train.step import Training

# From the ground up. `compile` and `fp8` are settings of the run; the others are undone here.
RUNGS = ("compile", "attention", "loss", "optimizer", "fp8")
_EXPLAINED = {
    "compile": "each block through torch.compile",
    "attention": "cuDNN's attention instead of flash",
    "loss": "head and loss in chunks instead of whole fp32 logits",
    "optimizer": "fused update instead of one kernel per operation",
    "fp8": "matrix products in fp8",
}


def rungs_of(run: RunSpec) -> list[str]:
    """The rungs that this run has; weights or moments in bf16 come with an update that is fused anyway."""
    is_plain = run.precision.weights == "fp32" and run.optim.state == "fp32"
    absent = {"fp8": run.precision.fp8 is None, "optimizer": not is_plain, "compile": not run.compile}
    return [rung for rung in RUNGS if not absent.get(rung, False)]


def explain(rung: str) -> str:
    return _EXPLAINED[rung]


def whole_loss(
    x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, weights_BS: Tensor, **_: object
) -> Tensor:
    """Head and cross-entropy as everyone writes them first."""
    wide_TV = functional.linear(x_BSD, weight_VD).flatten(0, -2).float()
    losses_T = functional.cross_entropy(wide_TV, targets_BS.flatten(), reduction="none")
    return (losses_T * weights_BS.flatten()).sum()


@contextmanager
def without_rungs(rungs: Collection[str]) -> Iterator[Callable[[Training], None]]:
    """Inside the block these rungs are gone; call what it yields on the training once it is built."""

    def adjust(training: Training) -> None:
        if "optimizer" in rungs:
            _unfuse(training.optimizer)

    with ExitStack() as undone:
        if "attention" in rungs:
            torch.backends.cuda.enable_cudnn_sdp(False)
            undone.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        if "loss" in rungs:
            undone.enter_context(patch.object(decoder, "linear_cross_entropy", whole_loss))
        yield adjust


def _unfuse(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = False, True
    for state in optimizer.state.values():
        if "step" in state:  # on the device it would be waited for, parameter by parameter
            state["step"] = state["step"].cpu()
