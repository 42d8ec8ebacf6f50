"""What the planner predicts for a run that is watched."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster, find_device, generic_cluster
from meshwright.hardware.profile import cluster_of
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.time.step_time import COMMUNICATION
from meshwright.spec.text import load_run


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted figures of a run, in the units of its metrics; None and a reason where there are none."""

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_bytes: float | None = None
    communication_share: float | None = None
    """Exposed communication / step time."""
    text: str = ""
    """The cluster that was assumed, or why there is no prediction."""


def predicted(run_file: Path, device: str | None, on: str) -> Predicted:
    """The prediction for a run file on the cluster of `--on`, or on the device that the run has recorded."""
    if not on and (device is None or device == "cpu"):
        reason = "cpu has no prediction" if device else "the run has not recorded its device"
        return Predicted(text=f"{reason}; name a cluster with --on")
    try:
        run = load_run(str(run_file))
        cluster = _cluster(on, device or "", run.parallel.num_ranks)
        return _figures(predict_run(run, cluster), cluster)
    except MeshwrightError as error:
        return Predicted(text=f"no prediction: {error.fact}")


def _cluster(on: str, device: str, num_ranks: int) -> Cluster:
    return cluster_of(on) if on else generic_cluster(find_device(device)).with_devices(num_ranks)


def _figures(found: Prediction, cluster: Cluster) -> Predicted:
    exposed = sum(found.seconds_by_item.get(item, 0.0) for item in COMMUNICATION)
    return Predicted(
        step_seconds=found.step_seconds,
        tokens_per_second=found.tokens_per_second_per_device * found.num_devices,
        tflops_per_gpu=found.tflops_per_device,
        mfu=found.mfu,
        peak_bytes=found.peak_stage.allocated_bytes,
        communication_share=exposed / found.step_seconds,
        text=f"predicted for {cluster.name}, {cluster.num_devices} devices",
    )
