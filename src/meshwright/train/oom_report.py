"""What a person must know when a run is out of memory: predicted beside held, and what to change."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.errors import RunError
from meshwright.hardware.catalogue import Cluster
from meshwright.mesh import Mesh
from meshwright.observe.prediction_check import cluster_here, predict_here
from meshwright.plan.explain.remedies import remedies
from meshwright.plan.predict import Prediction, predict_run
from meshwright.resilience.shortage import Shortage
from meshwright.spec import RunSpec
from meshwright.spec.check import check
from meshwright.spec.modules import FitSpec
from meshwright.train.state_bytes import Held, held_bytes
from meshwright.train.step import Training
from meshwright.units import show_bytes

# A change is worth telling when it is predicted to need this much less than the run that did not fit.
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


def smaller_microbatch(run: RunSpec | FitSpec) -> RunSpec | None:
    """Half the micro-batch (or the next smaller part of it) and as many more of them; None at the end."""
    if not isinstance(run, RunSpec):
        return None
    size = run.data.microbatch_sequences
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0), None)
    if smaller is None:
        return None
    changed = run.with_(data=run.data.with_(microbatch_sequences=smaller))
    on_oom = "stop" if smaller == 1 else run.memory.on_oom  # there is nothing left to halve
    changed = changed.with_(memory=run.memory.with_(on_oom=on_oom))
    return None if check(changed) else changed


def out_of_memory(
    run: RunSpec | FitSpec, mesh: Mesh, training: Training, shortage: Shortage, *, step: int, run_dir: Path
) -> RunError:
    """The error of a rank whose world ran out of memory in the step after `step`; no communication."""
    rows = compare(predict_here(run, mesh.device), mesh, training)
    return RunError(
        f"rank {shortage.rank} ran out of memory in step {step + 1}: {shortage.text}\n{table(rows)}",
        where=str(run_dir),
        hint=_hint(run, cluster_here(run, mesh.device), rows),
    )


def compare(prediction: Prediction | None, mesh: Mesh, training: Training) -> list[Comparison]:
    """By category, of this rank: what was predicted for its stage, and what it holds or held at its peak."""
    held = held_bytes(training)
    items = _predicted(prediction, mesh)
    measured = {**_state(held), _REST: _rest(held, mesh.device)}
    return [Comparison(name, items.get(name), size) for name, size in measured.items()]


def _state(held: Held) -> dict[str, float | None]:
    return {"weights": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}


def _rest(held: Held, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.max_memory_allocated(device) - held.total)


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
        return _WITHOUT_PREDICTION + _by_itself(run)
    worst = max(known, key=lambda row: row.excess)
    return _blame(worst) + _changes(run, cluster) + _by_itself(run)


def _by_itself(run: RunSpec | FitSpec) -> str:
    if not isinstance(run, RunSpec) or run.memory.on_oom != "stop" or run.data.microbatch_sequences == 1:
        return ""
    return "; memory.on_oom=halve_microbatch takes smaller micro-batches by itself"


def _blame(worst: Comparison) -> str:
    if worst.excess <= 0:
        return "no category is above its prediction: the memory went to something else on the card; "
    return f"{worst.category} were under-predicted by {show_bytes(worst.excess)}; "


def _changes(run: RunSpec, cluster: Cluster) -> str:
    """Changes that are predicted to need clearly less than this run, whatever the prediction missed."""
    needed = predict_run(run, cluster).fullest.device_bytes
    device = replace(cluster.device, memory_bytes=int(needed * (1.0 - LEAST_SAVING)))
    found = remedies(run, replace(cluster, device=device))
    if not found:
        return _WITHOUT_PREDICTION
    return "any one of these needs less:" + "".join(f"\n         - {remedy.words}" for remedy in found)
