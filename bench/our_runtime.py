"""Our own runtime as measured on one H200 against its prediction: bench/results/runtime_h200_*.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from meshwright.hardware import parse_cluster
from meshwright.plan.frameworks import meshwright
from meshwright.plan.layouts import RECOMPUTE_BITS, layouts
from meshwright.plan.predict import predict_layout
from meshwright.plan.workload import Workload
from meshwright.spec.families import family

RESULTS = Path(__file__).parent / "results" / "runtime_h200_2026-11-15.json"


@dataclass(frozen=True)
class Measured:
    """One measured step, with predicted over measured of its three figures."""

    label: str
    step_seconds: float
    time_ratio: float
    allocated_ratio: float
    reserved_ratio: float
    is_inside: bool
    """The measured time lies in the predicted interval."""


def our_runtime_table() -> list[Measured]:
    """Every measured row."""
    return [_compare(row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def _compare(row: dict[str, object]) -> Measured:
    work = Workload(
        family(str(row["family"])), int(str(row["sequence_length"])), compiled=bool(row["compile"])
    )
    at = layouts(
        microbatch_sequences=row["microbatch_sequences"],
        num_microbatches=row["accumulation"],
        recompute=RECOMPUTE_BITS[str(row["recompute"])],
    )
    found = predict_layout(work, at, parse_cluster("h200:1"), meshwright())
    seconds = float(str(row["step_seconds"]))
    compiled = ", compiled" if row["compile"] else ""
    label = (
        f"{row['family']}, {row['accumulation']} x {row['microbatch_sequences']} x {row['sequence_length']}, "
        f"recompute {row['recompute']}{compiled}"
    )
    return Measured(
        label,
        seconds,
        found.step_seconds / seconds,
        found.fullest.allocated_bytes / float(str(row["allocated_bytes"])),
        found.fullest.reserved_bytes / float(str(row["reserved_bytes"])),
        found.low_seconds <= seconds <= found.high_seconds,
    )
