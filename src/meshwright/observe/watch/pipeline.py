"""The pipeline timeline of the last profiled step, as the live page draws it."""

from pathlib import Path
from typing import Any

from meshwright.files import MIB, read_json_file
from meshwright.observe.profile.pipeline_timeline import TIMELINE_FILE, timelines
from meshwright.plan.time.timeline import TimedAction

PROFILE_FOLDER = "profile"
MAX_RANKS = 32
MAX_ACTIONS = 1024
_MAX_BYTES = 64 * MIB


def timeline_path(run_dir: Path) -> Path:
    """Where `meshwright profile` writes the timeline of a run."""
    return run_dir / PROFILE_FOLDER / TIMELINE_FILE


def read_timeline(run_dir: Path) -> dict[str, Any] | None:
    """Measured and predicted actions of the first pipeline ranks; None where the file cannot be read."""
    try:
        document = read_json_file(timeline_path(run_dir), max_bytes=_MAX_BYTES)
        measured, predicted = timelines(document)
        ranks = [int(rank["rank"]) for rank in document["ranks"]]
        seconds = {name: float(document[name]) for name in ("measured_seconds", "predicted_seconds")}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    rows = zip(ranks, measured.ranks, predicted.ranks, strict=True)
    return {
        **seconds,
        "schedule": str(document.get("schedule", "")),
        "num_ranks": len(ranks),
        "ranks": [
            {"rank": rank, "measured": _rows(found), "predicted": _rows(wanted)}
            for rank, found, wanted in list(rows)[:MAX_RANKS]
        ],
    }


def _rows(actions: tuple[TimedAction, ...]) -> list[list[Any]]:
    """[kind, stage, micro-batch, start, end] of each action."""
    return [[*timed.action, timed.start, timed.end] for timed in actions[:MAX_ACTIONS]]
