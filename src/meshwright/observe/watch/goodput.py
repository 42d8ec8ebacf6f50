"""Goodput: the share of wall time that went into steps which count."""

from collections.abc import Sequence

import numpy as np

from meshwright.observe.events import Event
from meshwright.observe.watch.columns import Columns


def goodput(events: Sequence[Event], columns: Columns, *, until: float) -> float | None:
    """Time of the recorded steps / time from the first start until `until` (seconds since 1970).

    Lost steps are not in the metrics, so restarts, saves, evaluation and waiting for a new job lower it.
    """
    starts = [event["time"] for event in events if event["kind"] in ("start", "resume")]
    if not starts or "step_seconds" not in columns.names:
        return None
    seconds = columns.values("step_seconds").astype(np.float64)
    # A line stands for all steps since the one before it.
    num_steps = np.diff(columns.steps, prepend=0)
    useful = float((np.where(np.isfinite(seconds), seconds, 0.0) * num_steps).sum())
    wall = max(until - starts[0], useful)
    return useful / wall if wall > 0 else None
