"""summary.json: what a run came to, written once when it ends (finished, interrupted or failed)."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.observe.metrics import to_json

SUMMARY_NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts of the run as a whole that are not in run.yaml or in a step's metrics."""

    outcome: Literal["finished", "interrupted", "failed"]
    final_step: int
    wall_seconds: float
    """From the first start to the end, over all sessions of the run, without the time between them."""
    num_ranks: int
    device: str
    """In words, such as `NVIDIA H100 80GB HBM3` or `cpu`."""
    num_parameters: int
    flops_per_token: float | None
    fingerprint: str
    """Of the resolved run."""
    unigram_entropy: float | None = None
    """Nats per token of the corpus without context: a loss below it means that context was learned."""
    num_skipped: int = 0
    """fp16: updates left out because gradients overflowed."""
    versions: dict[str, str] = field(default_factory=dict)
    """Such as {"meshwright": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}."""


def write_summary(run_dir: Path | str, summary: RunSummary) -> None:
    """Replaces summary.json as a whole. Rank 0 calls it."""
    path = Path(run_dir) / SUMMARY_NAME
    draft = path.with_name(path.name + ".draft")
    with draft.open("w") as file:
        file.write(to_json(asdict(summary)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_summary(run_dir: Path | str) -> dict[str, Any]:
    """What is there of summary.json; empty when missing or damaged."""
    try:
        values = json.loads((Path(run_dir) / SUMMARY_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
