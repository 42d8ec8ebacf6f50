"""Loads trained weights into a plain module."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from meshwright.checkpoint.load import load_tensors, read_manifest, saved_shapes, verify_files
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.errors import CheckpointError
from meshwright.user_errors import errors_end_at_caller

Module = TypeVar("Module", bound=nn.Module)


@errors_end_at_caller
def load_weights(
    model: Module, directory: str | Path, *, step: int | None = None, ema: bool = False
) -> Module:
    """Load weights and buffers of a run of `fit` or `prepare`, of any mesh, into a module; returns it.

    `directory` is a run directory (its newest checkpoint, or that of `step`) or a checkpoint. `ema` takes
    the moving average of the weights. Each process reads for itself: one rank may call it alone.
    """
    folder = locate_weights(directory, where="directory", step=step)
    if not is_checkpoint(folder):
        raise CheckpointError(
            "there is no checkpoint in this folder",
            where=str(folder),
            hint="name a run directory or a step-<n>",
        )
    verify_files(folder, read_manifest(folder), is_shared=False)
    load_tensors(folder, _wanted(model, set(saved_shapes(folder)), folder, ema=ema))
    return model


def _wanted(model: nn.Module, saved: set[str], folder: Path, *, ema: bool) -> dict[str, Tensor]:
    if ema and not any(name.startswith("ema.") for name in saved):
        raise CheckpointError(
            "this run has no moving average",
            where=str(folder),
            hint="leave ema out, or train with ema_decay",
        )
    wanted: dict[str, Tensor] = {
        f"buffers.{name}": buffer for name, buffer in persistent_buffers([model]).items()
    }
    for name, parameter in model.named_parameters():
        averaged = ema and f"ema.{name}" in saved  # a frozen parameter has no average
        wanted[f"ema.{name}" if averaged else f"model.{name}"] = parameter.detach()
    return wanted


def persistent_buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The buffers of a state dict, by name."""
    found: dict[str, Tensor] = {}
    for module in modules:
        saved = module.state_dict(keep_vars=True)
        found |= {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return found
