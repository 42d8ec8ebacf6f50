"""How large the work of a run is: parameters, FLOPs, and the entropy of its data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.data.corpus import unigram_entropy
from meshwright.data.stream import open_source
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import find_device
from meshwright.mesh import Mesh
from meshwright.observe.metrics import WorkRate
from meshwright.observe.prediction_check import device_title
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import PrecisionSpec, RunSpec
from meshwright.spec.parameters import num_parameters

# The unigram entropy settles long before this many tokens; reading them takes a fraction of a second.
ENTROPY_TOKENS = 2**24


@dataclass(frozen=True)
class Workload:
    """How large the work is; None where it is not known."""

    num_parameters: int
    flops_per_token: float | None
    entropy: Callable[[], float | None]
    """Nats per token of the data without context."""
    counted: str = "tokens"
    """What the positions of a batch are called on the terminal: tokens or samples."""


def token_workload(run: RunSpec) -> Workload:
    """The workload of a model of this package on tokens."""
    return Workload(
        num_parameters=num_parameters(run.model),
        flops_per_token=flops_per_token(run.model, run.data.sequence_length),
        entropy=lambda: corpus_entropy(run),
    )


def corpus_entropy(run: RunSpec) -> float | None:
    """Nats per token of the data without context, from a bounded prefix; None where it cannot be read."""
    try:
        return unigram_entropy(open_source(run.data.sources[0]).tokens[:ENTROPY_TOKENS])
    except MeshwrightError:  # the data was removed while the run ran: no reason to lose the summary
        return None


def work_rate(workload: Workload, mesh: Mesh, precision: PrecisionSpec) -> WorkRate:
    """The factors that turn tokens per second into TFLOP/s and MFU on this device."""
    return WorkRate(
        flops_per_token=workload.flops_per_token,
        num_ranks=mesh.parallel.num_ranks,
        peak_flops_per_second=_peak_flops(precision, mesh.device),
    )


def _peak_flops(precision: PrecisionSpec, device: torch.device) -> float | None:
    """The catalogue's dense peak; None for a CPU or a device that is not listed."""
    if device.type != "cuda":
        return None
    try:
        return find_device(device_title(device)).peak(precision.compute)
    except MeshwrightError:
        return None
