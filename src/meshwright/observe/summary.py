"""summary.json: the outcome of a run, written when it ends (finished, interrupted or failed)."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.files import MIB, read_json_file
from meshwright.observe.metrics import to_json

SUMMARY_NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts of a run that are neither in run.yaml nor in the metrics of a step."""

    outcome: Literal["finished", "interrupted", "failed"]
    final_step: int
    wall_seconds: float
    """Wall time of steps, over all sessions of the run."""
    num_ranks: int
    device: str
    """Name of the device, such as `NVIDIA H100 80GB HBM3` or `cpu`."""
    num_parameters: int
    flops_per_token: float | None
    fingerprint: str
    """Fingerprint of the resolved run."""
    unigram_entropy: float | None = None
    """Nats per token of the corpus without context: a loss below it means that context was learned."""
    num_skipped: int = 0
    """fp16: updates that were skipped because gradients overflowed."""
    goodput: float | None = None
    """Time of steps that count / wall time, over all starts of the run; None where it is not known."""
    goodput_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by cause: step, start, compile, data, checkpoint, evaluate, restart, lost, other."""
    num_restarts: int = 0
    """Restarts by the supervisor."""
    lost_steps: int = 0
    """Steps that were repeated after restarts."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of packages, such as {"meshwright": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}."""


def write_summary(run_dir: Path | str, summary: RunSummary) -> None:
    """Replace summary.json atomically; rank 0 calls it."""
    path = Path(run_dir) / SUMMARY_NAME
    draft = path.with_name(path.name + ".draft")
    with draft.open("w") as file:
        file.write(to_json(asdict(summary)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_summary(run_dir: Path | str) -> dict[str, Any]:
    """The values of summary.json; empty when missing or damaged."""
    try:
        values = read_json_file(Path(run_dir) / SUMMARY_NAME, max_bytes=16 * MIB)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
