"""Steps of our own runtime measured on one H200 (bench/results) against their prediction."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.hardware import parse_cluster
from meshwright.plan.predict import predict_run
from meshwright.spec import RunSpec
from meshwright.spec.text import parse_run
from meshwright.spec.yaml_text import dump_yaml

RESULTS = Path(__file__).parent / "results"
FILES = (
    "runtime_h200_2026-11-15.json",
    "formats_h200_2026-11-15.json",
    "documents_h200_2026-11-16.json",
)


@dataclass(frozen=True)
class Measured:
    """One measured step, and predicted over measured of its time and memory."""

    label: str
    step_seconds: float
    time_ratio: float
    allocated_ratio: float | None
    """None where it was not measured; so is `reserved_ratio`."""
    reserved_ratio: float | None
    is_inside: bool
    """Whether the measured time is inside the predicted interval."""


def our_runtime_table() -> list[Measured]:
    """One row per measured step."""
    return [
        _compare(row) for name in FILES for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))
    ]


def measured_run(row: dict[str, Any]) -> RunSpec:
    """The run of a row; precision settings that it lacks are those of a plain bf16 run."""
    precision = {"compute": "bf16", "weights": row.get("weights", "fp32"), "fp8": row.get("fp8")}
    sequences = row["microbatch_sequences"] * row["accumulation"]
    tree = {
        "model": _model(row),
        "compile": row["compile"],
        "precision": {**precision, "gradients": row.get("gradients", "fp32")},
        "optim": {"state": row.get("moments", "fp32")},
        "memory": {"recompute": row["recompute"]},
        "schedule": {"num_steps": 10},
        "data": {
            "synthetic": {},
            "sequence_length": row["sequence_length"],
            "microbatch_sequences": row["microbatch_sequences"],
            "batch_sequences": sequences,
            "documents": row.get("documents", "joined"),  # separate: an eighth of a sequence on average
        },
    }
    return parse_run(dump_yaml(tree)).run


def _model(row: dict[str, Any]) -> Any:
    layers = row.get("num_layers")
    return row["family"] if layers is None else {"family": row["family"], "num_layers": layers}


def _compare(row: dict[str, Any]) -> Measured:
    run = measured_run(row)
    found = predict_run(run, parse_cluster("h200:1"))
    seconds, peak = float(row["step_seconds"]), found.peak_stage
    return Measured(
        _label(row),
        seconds,
        found.step_seconds / seconds,
        peak.allocated_bytes / float(row["allocated_bytes"]) if "allocated_bytes" in row else None,
        peak.reserved_bytes / float(row["reserved_bytes"]) if row.get("reserved_bytes") else None,
        found.low_seconds <= seconds <= found.high_seconds,
    )


def _label(row: dict[str, Any]) -> str:
    parts = [
        str(row["family"]) + (f" cut to {row['num_layers']} layers" if "num_layers" in row else ""),
        f"{row['accumulation']} x {row['microbatch_sequences']} x {row['sequence_length']}",
        f"recompute {row['recompute']}",
        *(["compiled"] if row["compile"] else []),
        *(f"{name} {row[name]}" for name in ("weights", "gradients", "moments") if name in row),
        *(["fp8"] if row.get("fp8") else []),
        *(["separate documents"] if row.get("documents") == "separate" else []),
    ]
    return ", ".join(parts)
