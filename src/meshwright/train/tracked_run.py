"""What trackers are told about a run."""

import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.events import without_credentials
from meshwright.observe.prediction_check import device_title
from meshwright.observe.trackers.tracker import TrackedRun
from meshwright.train.job import Job


def tracked_run(job: Job, run_dir: Path) -> TrackedRun:
    """The resolved settings of a run, and facts about the machine it is on. No environment variables."""
    settings = dict(_dotted(job.run.model_dump(mode="json")))
    return TrackedRun(name=job.run.name, run_dir=run_dir, settings=settings, facts=_facts(job, run_dir))


def _facts(job: Job, run_dir: Path) -> dict[str, Any]:
    return {
        "device": device_title(job.mesh.device),
        "num_ranks": job.mesh.parallel.num_ranks,
        "host": socket.gethostname(),
        "run_dir": str(run_dir.resolve()),
        "num_parameters": job.workload.num_parameters,
        "flops_per_token": job.workload.flops_per_token,
        "fingerprint": job.run.fingerprint(),
        "meshwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", without_credentials(value)
