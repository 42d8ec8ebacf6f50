"""Log of predicted and measured memory and step time of the runs on this machine: one line of JSON per run.

`train` writes a pair at step 20, `rehearse --measure` after its measured steps. Predictions do not use these
pairs; `plan` and `predict` print how far off past predictions were on this kind of device.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, cast

from meshwright.units import show_bytes, show_seconds

HOME_VARIABLE = "MESHWRIGHT_HOME"
FILE = "observed.jsonl"
KEPT = 200
"""Most pairs in the log of a machine; the oldest are dropped."""


@dataclass(frozen=True)
class Pair:
    """Predicted and measured values of one run: seconds per step, and peak allocated bytes."""

    device: str
    """Name of the device in the catalogue."""
    model: str
    layout: str
    num_ranks: int
    precision: str
    predicted_bytes: float
    measured_bytes: float
    predicted_seconds: float
    measured_seconds: float
    source: str = "train"

    @property
    def line(self) -> str:
        """`predicted 61.2 GiB, 930 ms; measured 61.5 GiB, 970 ms`."""
        predicted = f"predicted {show_bytes(self.predicted_bytes)}, {show_seconds(self.predicted_seconds)}"
        return (
            f"{predicted}; measured {show_bytes(self.measured_bytes)}, {show_seconds(self.measured_seconds)}"
        )


def machine_folder() -> Path:
    """The folder for measurements of this machine: $MESHWRIGHT_HOME, or ~/.cache/meshwright."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "meshwright"


def store_pair(pair: Pair, folder: Path | None = None) -> Path | None:
    """Append a pair and return the path; None where the folder cannot be written, which ends no run."""
    path = (folder or machine_folder()) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        draft = path.with_name(f".{FILE}.{os.getpid()}")
        draft.write_text("\n".join([*lines[1 - KEPT :], json.dumps(asdict(pair))]) + "\n", encoding="utf-8")
        draft.replace(path)
    except (OSError, UnicodeDecodeError):
        return None
    return path


def read_pairs(device: str, folder: Path | None = None) -> list[Pair]:
    """The pairs of one kind of device, oldest first; malformed lines are skipped."""
    try:
        lines = ((folder or machine_folder()) / FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    pairs = [_pair(line) for line in lines]
    return [pair for pair in pairs if pair is not None and pair.device == device]


def _pair(line: str) -> Pair | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    entry = cast("dict[str, Any]", found)
    known = {field.name: entry.get(field.name, field.default) for field in fields(Pair)}
    numbers = [known[name] for name in known if name.endswith(("_bytes", "_seconds"))]
    texts = [known[name] for name in ("device", "model", "layout", "precision", "source")]
    is_sound = all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
    if not is_sound or not all(isinstance(text, str) for text in texts):
        return None
    return Pair(**known)


def observed_line(pairs: Sequence[Pair], device: str) -> str | None:
    """Median error of predictions on this device, in one line; None without observations."""
    if not pairs:
        return None
    of_bytes = median(pair.measured_bytes / pair.predicted_bytes for pair in pairs)
    of_seconds = median(pair.measured_seconds / pair.predicted_seconds for pair in pairs)
    runs = "1 run" if len(pairs) == 1 else f"{len(pairs)} runs"
    return (
        f"observed on {device}: {runs} here needed {of_bytes:.2f} x the predicted memory "
        f"and {of_seconds:.2f} x the predicted time (median)"
    )
