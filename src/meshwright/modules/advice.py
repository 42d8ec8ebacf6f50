"""Notes on user modules that are valid but waste a GPU: convolutions, loaders, flags. Small named functions.

`fit` and `prepare` print them once, on rank 0, before the first step. Their costs were not measured, so none
is given in percent; the data wait in the metrics shows those of a loader.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.modules.dataset import LoaderOptions
from meshwright.spec.advice import Advice
from meshwright.spec.modules import FitSpec, ModuleSpec

# Channels that fill the tensor cores: 16 bytes.
_MULTIPLE = {"bf16": 8, "fp16": 8, "tf32": 4, "fp32": 4}
_NOT_MEASURED = "cost not measured"


@dataclass(frozen=True)
class ModuleRun:
    """A user's module and how it is trained."""

    model: nn.Module
    spec: ModuleSpec
    options: LoaderOptions | None = None
    """How samples are loaded; None where `open_loader` or the user's own loop loads them."""

    @property
    def convolutions(self) -> dict[str, nn.Module]:
        """The two- and three-dimensional convolutions by name."""
        kinds = nn.Conv2d | nn.Conv3d
        return {name: one for name, one in self.model.named_modules() if isinstance(one, kinds)}


def print_advice(run: ModuleRun, device: torch.device) -> None:
    """Print every note on a run on a GPU; for rank 0. A CPU has none of these costs."""
    if device.type == "cuda":
        for note in advise_module(run):
            print(f"note: {note.fact}\n  where: {note.where}\n  hint:  {note.hint}", file=sys.stderr)


def advise_module(run: ModuleRun) -> list[Advice]:
    """Everything in a module's run that wastes a GPU."""
    return [note for advisor in MODULE_ADVISORS for note in advisor(run)]


def convolutions_are_channels_last(run: ModuleRun) -> Iterator[Advice]:
    """Convolutions are in NHWC: tensor cores read channels together, and NCHW is transposed first."""
    weights = [one.weight for one in run.convolutions.values() if isinstance(one, nn.Conv2d)]
    formats = [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights]
    if weights and not any(formats):
        fact = f"{len(weights)} convolutions are in NCHW ({_NOT_MEASURED})"
        hint = "model.to(memory_format=torch.channels_last), and the same for the images in the loss"
        yield Advice(fact, "model", hint)


def channels_fill_tensor_cores(run: ModuleRun) -> Iterator[Advice]:
    """Channels of convolutions are multiples of 16 bytes, apart from those of the input image."""
    multiple = _MULTIPLE.get(run.spec.precision.compute)
    if multiple is None:
        return
    odd = [name for name, one in list(run.convolutions.items()) if _is_odd(one, multiple)]
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        fact = f"channels of {odd[0]}{more} are no multiple of {multiple} ({_NOT_MEASURED})"
        yield Advice(fact, "model", f"use multiples of {multiple}: others leave tensor cores idle")


def _is_odd(one: nn.Module, multiple: int) -> bool:
    assert isinstance(one, nn.Conv2d | nn.Conv3d)
    if one.groups > 1:
        return False
    is_image = one.in_channels < multiple
    return one.out_channels % multiple > 0 or (not is_image and one.in_channels % multiple > 0)


def matmuls_use_tensor_cores(run: ModuleRun) -> Iterator[Advice]:
    """fp32 keeps matmuls and convolutions off the tensor cores."""
    if run.spec.precision.compute == "fp32":
        fact = f"compute=fp32 leaves the tensor cores idle: TF32 is off ({_NOT_MEASURED})"
        hint = "precision={'compute': 'tf32'} keeps the range; bf16 is faster still"
        yield Advice(fact, "precision.compute", hint)


def kernels_are_chosen_by_time(run: ModuleRun) -> Iterator[Advice]:
    """cuDNN times its kernels (benchmark) unless the run is deterministic."""
    if run.spec.deterministic:
        fact = f"deterministic=true: cuDNN does not time its kernels, and some are slower ({_NOT_MEASURED})"
        yield Advice(fact, "deterministic", "leave it out where losses need not be bitwise equal")


def samples_are_prefetched(run: ModuleRun) -> Iterator[Advice]:
    """Workers load the next batches while the device computes."""
    is_kept = isinstance(run.spec, FitSpec) and run.spec.data.on_device
    if run.options is not None and run.options.num_workers == 0 and not is_kept:
        fact = f"num_workers=0: the device waits while each batch is loaded ({_NOT_MEASURED})"
        yield Advice(fact, "data.num_workers", "data={'num_workers': 'auto'} reads a few samples and chooses")


def batches_are_pinned(run: ModuleRun) -> Iterator[Advice]:
    """A batch in pinned memory is copied to the device while it computes."""
    if run.options is not None and not run.options.pin_memory:
        fact = f"the DataLoader has pin_memory=False: the host waits for each copy ({_NOT_MEASURED})"
        yield Advice(fact, "dataset", "pass pin_memory=True to the DataLoader")


MODULE_ADVISORS: list[Callable[[ModuleRun], Iterator[Advice]]] = [
    convolutions_are_channels_last,
    channels_fill_tensor_cores,
    matmuls_use_tensor_cores,
    kernels_are_chosen_by_time,
    samples_are_prefetched,
    batches_are_pinned,
]
