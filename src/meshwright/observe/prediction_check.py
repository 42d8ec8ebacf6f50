"""Predicted beside measured: after some steps a run prints both, and stores the pair for this machine."""

from statistics import median

import torch

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster, find_device, generic_cluster
from meshwright.hardware.prediction_log import Pair, store_pair
from meshwright.observe.metrics import StepMetrics
from meshwright.plan.predict import Prediction, predict_run
from meshwright.spec import MESH_ORDER, RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.units import show_bytes, show_seconds

DUE_STEPS = 20
"""Steps after which predicted and measured are compared."""


def device_title(device: torch.device) -> str:
    """Name of a device, such as `NVIDIA H200` or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def cluster_here(run: RunSpec | FitSpec, device: torch.device) -> Cluster | None:
    """A cluster of as many of this device as the run has ranks; None where it is not in the catalogue.

    The catalogue's CPU is a rough figure for plans, too rough to compare with.
    """
    if device.type != "cuda":
        return None
    try:
        return generic_cluster(find_device(device_title(device))).with_devices(run.parallel.num_ranks)
    except MeshwrightError:
        return None


def predict_here(run: RunSpec | FitSpec, device: torch.device) -> Prediction | None:
    """The prediction for this run on this kind of device; None for users' modules and unknown devices."""
    cluster = cluster_here(run, device)
    try:
        return predict_run(run, cluster) if cluster is not None and isinstance(run, RunSpec) else None
    except MeshwrightError:
        return None


def pair_of(
    run: RunSpec,
    device: torch.device,
    prediction: Prediction,
    *,
    peak_bytes: int,
    seconds: float,
    source: str = "train",
) -> Pair:
    """Predicted and measured bytes and seconds of a run on this device."""
    parallel = run.parallel
    axes = [f"{axis}={getattr(parallel, axis)}" for axis in MESH_ORDER if getattr(parallel, axis) > 1]
    return Pair(
        device=find_device(device_title(device)).name,
        model=run.model.family,
        layout=" ".join([*axes, f"zero={parallel.zero}"]) if axes else "one device",
        num_ranks=parallel.num_ranks,
        precision=run.precision.compute,
        predicted_bytes=prediction.peak_stage.allocated_bytes,
        measured_bytes=peak_bytes,
        predicted_seconds=prediction.step_seconds,
        measured_seconds=seconds,
        source=source,
    )


class PredictionCheck:
    """Compares the first steps of a run with their prediction, on rank 0, once."""

    def __init__(self, run: RunSpec | FitSpec, device: torch.device) -> None:
        self._run, self._device = run, device
        self._steps: list[StepMetrics] = []
        self._is_reported = False

    def after_step(self, metrics: StepMetrics) -> str | None:
        """Take in one step; the line to print, when this step makes it due."""
        self._steps.append(metrics)
        is_due = metrics.step - self._steps[0].step + 1 >= DUE_STEPS
        return self.report() if is_due else None

    def report(self) -> str | None:
        """The line to print; None where it was given before or no step was measured. Stores the pair."""
        if self._is_reported or not self._steps:
            return None
        self._is_reported = True
        seconds = median(one.step_seconds for one in self._steps[1:] or self._steps)  # the first warms up
        peak_bytes = self._steps[-1].peak_bytes or 0
        prediction = predict_here(self._run, self._device)
        if prediction is None or not isinstance(self._run, RunSpec):
            kind = "resident " if self._device.type == "cpu" else ""
            measured = f"measured {show_bytes(peak_bytes)} {kind}per rank, {show_seconds(seconds)} per step"
            what = device_title(self._device) if isinstance(self._run, RunSpec) else "a user's own module"
            return f"{measured}; {what} has no prediction"
        pair = pair_of(self._run, self._device, prediction, peak_bytes=peak_bytes, seconds=seconds)
        store_pair(pair)
        return pair.line
