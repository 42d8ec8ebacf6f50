"""The summary of a run, written to its directory when it ends."""

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from meshwright import __version__
from meshwright.observe.goodput import read_goodput
from meshwright.observe.prediction_check import device_title
from meshwright.observe.summary import RunSummary, write_summary
from meshwright.train.job import Job
from meshwright.train.state import TrainState

Ending = Literal["finished", "interrupted", "failed"]


def _goodput(run_dir: Path) -> dict[str, Any]:
    found = read_goodput(run_dir)
    if found is None:
        return {}
    seconds = asdict(found)
    counts = {name: seconds.pop(name) for name in ("num_restarts", "lost_steps")}
    return {"goodput": found.share, "goodput_seconds": seconds, **counts}


def summarise(job: Job, run_dir: Path, ending: Ending, state: TrainState) -> None:
    """Write summary.json; rank 0 does, other ranks return at once. No communication."""
    if job.mesh.rank != 0:
        return
    summary = RunSummary(
        outcome=ending,
        final_step=state.step,
        wall_seconds=state.train_seconds,
        num_ranks=job.mesh.parallel.num_ranks,
        device=device_title(job.mesh.device),
        num_parameters=job.workload.num_parameters,
        flops_per_token=job.workload.flops_per_token,
        fingerprint=job.run.fingerprint(),
        unigram_entropy=job.workload.entropy(),
        num_skipped=state.num_skipped,
        **_goodput(run_dir),
        versions={
            "meshwright": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    write_summary(run_dir, summary)
