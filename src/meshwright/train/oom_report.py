"""The text of a run that is out of memory: predicted beside measured by category, and what to change."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from meshwright.errors import OutOfMemory
from meshwright.hardware.catalogue import Cluster
from meshwright.launch.launched import is_local_rank, launched_rank
from meshwright.mesh import Mesh
from meshwright.observe.prediction_check import cluster_here, predict_here
from meshwright.plan.explain.fixes import run_fixes
from meshwright.plan.predict import Prediction, predict_run
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.train.capacity import one_line, out_of_memory_in
from meshwright.train.job import Job
from meshwright.train.state_bytes import StateBytes, count_state_bytes
from meshwright.train.step import Training
from meshwright.units import show_bytes

# A change is named when it is predicted to need this much less than the run that did not fit.
LEAST_SAVING = 0.1
_STATE = {"weights": ("weights", "master"), "gradients": ("gradients",), "optimizer": ("optimizer",)}
_REST = "activations"
_WITHOUT_PREDICTION = (
    "use a smaller data.microbatch_sequences, memory.recompute=full, a higher parallel.zero, or more ranks"
)


@dataclass(frozen=True)
class Comparison:
    """Bytes of one category on one rank; None where nothing is known."""

    category: str
    predicted: float | None
    measured: float | None

    @property
    def excess(self) -> float:
        """Measured beyond predicted."""
        return (self.measured or 0.0) - (self.predicted or 0.0)


class Steps(Protocol):
    """Anything that counts the steps of a run."""

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        ...


@contextmanager
def oom_explained(job: Job, progress: Steps, run_dir: Path) -> Iterator[None]:
    """Turns an OOM of this rank inside into an OutOfMemory error with what to change."""
    try:
        yield
    except Exception as error:
        oom = out_of_memory_in(error)
        if oom is None:
            raise
        raise explain_oom(job, oom, step=progress.step, run_dir=run_dir) from None


def explain_oom(job: Job, oom: BaseException, *, step: int, run_dir: Path) -> OutOfMemory:
    """The error of a rank that ran out of memory in the step after `step`; no communication."""
    run, device = job.run, job.mesh.device
    rows = compare(predict_here(run, device), job.mesh, job.training)
    return OutOfMemory(
        f"rank {job.mesh.rank} ran out of memory in step {step + 1}: {one_line(oom)}\n{table(rows)}",
        where=str(run_dir),
        hint=_hint(run, cluster_here(run, device), rows),
    )


def compare(prediction: Prediction | None, mesh: Mesh, training: Training) -> list[Comparison]:
    """By category: what was predicted for this rank's stage, and what its state takes or its peak was."""
    state = count_state_bytes(training)
    items = _predicted(prediction, mesh)
    measured = {**_by_category(state), _REST: _rest(state, mesh.device)}
    return [Comparison(name, items.get(name), size) for name, size in measured.items()]


def _by_category(state: StateBytes) -> dict[str, float | None]:
    return {"weights": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}


def _rest(state: StateBytes, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.max_memory_allocated(device) - state.total)


def _predicted(prediction: Prediction | None, mesh: Mesh) -> dict[str, float]:
    if prediction is None:
        return {}
    stages = prediction.stages
    position = mesh.coordinate("pp")
    last = mesh.parallel.pp - 1
    stage = stages[0] if len(stages) == 1 or position == 0 else stages[2 if position == last else 1]
    found = {name: sum(stage.items.get(item, 0.0) for item in items) for name, items in _STATE.items()}
    return {**found, _REST: stage.allocated_bytes - sum(found.values())}


def table(rows: list[Comparison]) -> str:
    """Readable without colour."""
    lines = [f"  {'':<12} {'predicted':>12} {'measured':>12}"]
    lines += [f"  {row.category:<12} {_shown(row.predicted):>12} {_shown(row.measured):>12}" for row in rows]
    return "\n".join(lines)


def _shown(size: float | None) -> str:
    return "unknown" if size is None else show_bytes(size)


def _hint(run: RunSpec | FitSpec, cluster: Cluster | None, rows: list[Comparison]) -> str:
    known = [row for row in rows if row.predicted is not None and row.measured is not None]
    if cluster is None or not known or not isinstance(run, RunSpec):
        return _WITHOUT_PREDICTION + _restart_hint(run)
    worst = max(known, key=lambda row: row.excess)
    return _under_predicted(worst) + _changes(run, cluster) + _restart_hint(run)


def _restart_hint(run: RunSpec | FitSpec) -> str:
    """What the next start does; only `meshwright train` that starts the ranks itself can restart them."""
    resumes = "; started again, the run resumes from its newest checkpoint"
    if not isinstance(run, RunSpec) or run.data.microbatch_sequences == 1 or run.memory.on_oom != "stop":
        return resumes
    if launched_rank() is not None and not is_local_rank():
        return resumes
    return f"{resumes}; memory.on_oom=halve_microbatch does that by itself, with smaller micro-batches"


def _under_predicted(worst: Comparison) -> str:
    if worst.excess <= 0:
        return "no category is above its prediction: something else on the device used the memory; "
    return f"{worst.category} were under-predicted by {show_bytes(worst.excess)}; "


def _changes(run: RunSpec, cluster: Cluster) -> str:
    """Changes that are predicted to need clearly less than this run, whatever the prediction missed."""
    needed = predict_run(run, cluster).peak_stage.device_bytes
    device = replace(cluster.device, memory_bytes=int(needed * (1.0 - LEAST_SAVING)))
    found = run_fixes(run, replace(cluster, device=device))
    if not found:
        return _WITHOUT_PREDICTION
    return "any one of these needs less:" + "".join(f"\n         - {fix.text}" for fix in found)
