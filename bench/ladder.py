"""The ablation ladder of our own step: each rung is what one technique adds to the rungs below it.

A rung is taken away by undoing it from outside, for a measurement only: the product has no such switches.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.train.step import Training

# From the ground up. `compile` and `fp8` are settings of the run; the others are undone here.
RUNGS = ("compile", "attention", "loss", "optimizer", "fp8")
_EXPLAINED = {
    "compile": "each block through torch.compile",
    "attention": "cuDNN's attention instead of flash",
    "loss": "our loss instead of cross-entropy over whole fp32 logits",
    "optimizer": "fused update instead of one kernel per operation",
    "fp8": "matrix products in fp8",
}


def explain(rung: str) -> str:
    return _EXPLAINED[rung]


class WholeLoss(nn.Module):
    """Cross-entropy as everyone writes it first."""

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor, weights_BS: Tensor) -> Tensor:
        wide_TV = logits_BSV.flatten(0, -2).float()
        losses_T = functional.cross_entropy(wide_TV, targets_BS.flatten(), reduction="none")
        return (losses_T * weights_BS.flatten()).sum()


@contextmanager
def without_rungs(rungs: Collection[str]) -> Iterator[Callable[[Training], None]]:
    """Inside the block these rungs are gone; call what it yields on the training once it is built."""
    if "attention" in rungs:
        torch.backends.cuda.enable_cudnn_sdp(False)

    def adjust(training: Training) -> None:
        if "loss" in rungs:
            for stage in training.program.stages:
                stage.loss = WholeLoss()
        if "optimizer" in rungs:
            _unfuse(training.optimizer)

    try:
        yield adjust
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _unfuse(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = False, True
    for state in optimizer.state.values():
        if "step" in state:  # on the device it would be waited for, parameter by parameter
            state["step"] = state["step"].cpu()
