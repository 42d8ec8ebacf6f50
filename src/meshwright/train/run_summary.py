"""The summary of a run, written to its directory when it ends."""

import platform
from pathlib import Path
from typing import Literal

import torch

from meshwright import __version__
from meshwright.observe.prediction_check import device_title
from meshwright.observe.summary import RunSummary, write_summary
from meshwright.train.job import Job
from meshwright.train.state import TrainState

Ending = Literal["finished", "interrupted", "failed"]


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
        versions={
            "meshwright": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    write_summary(run_dir, summary)
