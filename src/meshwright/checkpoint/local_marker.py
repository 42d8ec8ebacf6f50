"""local.json in the checkpoints of a run: the id and the newest step of its local checkpoints."""

import json
from pathlib import Path
from typing import Any

from meshwright.files import read_json_file

MARKER = "local.json"
_MAX_MARKER_BYTES = 4096


def local_step(run_root: Path) -> int:
    """The step of the newest local checkpoint of a run, by its marker; 0 where there is none."""
    step = _read_marker(run_root).get("step")
    return step if type(step) is int else 0


def marker_id(run_root: Path) -> str | None:
    """The id in the names of the run's local folders; None where there is none."""
    found = _read_marker(run_root).get("id")
    return found if isinstance(found, str) and found.isalnum() else None


def _read_marker(run_root: Path) -> dict[str, Any]:
    try:
        found = read_json_file(run_root / MARKER, max_bytes=_MAX_MARKER_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_marker(run_root: Path, values: dict[str, Any]) -> None:
    """Write beside it and rename. A failure costs the local checkpoint, not the run."""
    draft = run_root / f".{MARKER}"
    try:
        run_root.mkdir(exist_ok=True)
        draft.write_text(json.dumps(values))
        draft.replace(run_root / MARKER)
    except OSError:
        draft.unlink(missing_ok=True)
