"""Traced peaks that this machine remembers, so that `plan --verify` traces a layout once.

A peak belongs to a run, to the installed torch, and to the files of this package: a change of any of them is
traced again.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

import meshwright
from meshwright.hardware.prediction_log import machine_folder
from meshwright.spec import RunSpec
from meshwright.spec.text import dump_run

FILE = "traced_peaks.json"
KEPT = 500
"""Most peaks that are kept; the oldest are dropped."""


@dataclass(frozen=True)
class TracedPeak:
    """The rank of a run that allocates most."""

    rank: int
    allocated_bytes: float
    host_bytes: float


def peak_key(run: RunSpec) -> str:
    """What the peak of a run depends on, as a digest; its name does not matter."""
    text = f"{dump_run(run.with_(name='traced'))}\n{torch.__version__}\n{_package_state()}"
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _package_state() -> str:
    """Names, sizes and times of the files of this package."""
    root = Path(meshwright.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json", ".toml"))
    stats = [(str(path.relative_to(root)), path.stat()) for path in files]
    listed = "\n".join(f"{name} {one.st_size} {one.st_mtime_ns}" for name, one in stats)
    return hashlib.sha256(listed.encode()).hexdigest()


def read_peaks(folder: Path | None = None) -> dict[str, TracedPeak]:
    """The remembered peaks by their keys; a file that cannot be read is none."""
    try:
        content = json.loads(((folder or machine_folder()) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    found = {str(key): _peak(value) for key, value in content.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return {key: peak for key, peak in found.items() if peak is not None}


def _peak(value: object) -> TracedPeak | None:
    try:
        peak = TracedPeak(**value)  # pyright: ignore[reportCallIssue]
        sizes = (float(peak.allocated_bytes), float(peak.host_bytes))
    except (TypeError, ValueError):
        return None
    is_sound = all(map(math.isfinite, sizes)) and sizes[0] > 0 and isinstance(peak.rank, int)
    return peak if is_sound else None


def store_peaks(peaks: Mapping[str, TracedPeak], folder: Path | None = None) -> None:
    """Add these peaks to the file; a folder that cannot be written ends no plan."""
    path = (folder or machine_folder()) / FILE
    merged = {**read_peaks(folder), **peaks}
    kept = {key: asdict(merged[key]) for key in list(merged)[-KEPT:]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{FILE}.{os.getpid()}")
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(path)
    except OSError:
        return
