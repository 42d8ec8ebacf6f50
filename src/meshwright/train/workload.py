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
from meshwright.spec.adapter import adapter_parameters, is_trained
from meshwright.spec.parameters import MATMUL_KINDS, Parameter, num_parameters, parameters
from meshwright.spec.placement import is_routed_expert

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
        flops_per_token=trained_flops_per_token(run),
        entropy=lambda: corpus_entropy(run),
    )


def trained_flops_per_token(run: RunSpec) -> float:
    """Model FLOPs of one token of a run: frozen matmul weights count 4 in the place of 6, adapters 6.

    A frozen weight has a forward and an input gradient, and no weight gradient.
    """
    flops = flops_per_token(run.model, run.data.sequence_length)
    if run.adapter is None and not run.train_only:
        return flops
    head = "embedding.tokens.weight" if run.model.tied_head else "head.weight"
    listed = [one for one in parameters(run.model) if one.kind in MATMUL_KINDS or one.name == head]
    frozen = [one for one in listed if not is_trained(one.name, run.adapter, run.train_only)]
    adapters = [one for one in adapter_parameters(run.model, run.adapter) if one.kind != "magnitude"]
    return (
        flops + sum(6 * _active(run, one) for one in adapters) - sum(2 * _active(run, one) for one in frozen)
    )


def _active(run: RunSpec, parameter: Parameter) -> float:
    """Elements of a parameter that a token uses: of routed experts those of the chosen ones."""
    moe = run.model.moe
    is_routed = moe is not None and is_routed_expert(parameter.name)
    return parameter.num_elements * (moe.top_k / moe.num_experts if moe is not None and is_routed else 1.0)


def corpus_entropy(run: RunSpec) -> float | None:
    """Nats per token of the data without context, from a bounded prefix; None where it cannot be read.

    None also for preference pairs, whose loss is per pair.
    """
    if run.preference is not None:
        return None
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
