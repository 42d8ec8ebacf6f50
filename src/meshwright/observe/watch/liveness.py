"""Whether a run goes on: from its heartbeats, its summary and the processes of this host."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from meshwright.launch.heartbeat import Heartbeat, read_heartbeat

State = Literal["waiting", "running", "silent", "killed", "finished", "interrupted", "failed", "incomplete"]
# A rank on another host that has said nothing for so long may be gone: its process cannot be seen from here.
SILENT_SECONDS = 120.0
_MAX_HEARTBEATS = 4096


class Liveness(NamedTuple):
    """The state of a run, and why in one sentence."""

    state: State
    text: str


def heartbeats_of(run_dir: Path) -> list[Heartbeat]:
    """The heartbeats of all ranks that have a file."""
    try:
        names = sorted(os.listdir(run_dir / "heartbeats"))[:_MAX_HEARTBEATS]
    except OSError:
        return []
    found = (read_heartbeat(run_dir / "heartbeats" / name) for name in names)
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def liveness(
    heartbeats: Sequence[Heartbeat], summary: dict[str, Any], *, has_rows: bool, now: float | None = None
) -> Liveness:
    """The state of a run; ranks remove their heartbeats when they end, and killed ranks cannot."""
    now = time.time() if now is None else now
    here = socket.gethostname()
    dead = [one for one in heartbeats if one.host == here and not _is_alive(one)]
    if dead:
        return Liveness("killed", _killed_text(dead))
    if heartbeats:
        newest = max(heartbeats, key=lambda one: one.at)
        age = now - newest.at
        if age > SILENT_SECONDS and newest.host != here:
            return Liveness("silent", f"no rank has made progress for {age:.0f} s")
        if age > SILENT_SECONDS:
            return Liveness("silent", f"its processes exist, and no rank has made progress for {age:.0f} s")
        return Liveness("running", f"phase: {newest.phase}")
    outcome = summary.get("outcome")
    if outcome in ("finished", "interrupted", "failed"):
        return Liveness(outcome, "")
    if has_rows:
        return Liveness("incomplete", "no process works on it, and it wrote no summary")
    return Liveness("waiting", "no step is recorded yet")


def _killed_text(dead: list[Heartbeat]) -> str:
    first = min(dead, key=lambda one: one.at)
    ranks = ", ".join(str(one.rank) for one in dead[:8]) + (" and others" if len(dead) > 8 else "")
    return f"rank {ranks} ended without a word after step {first.step}, in phase {first.phase}"


def _is_alive(heartbeat: Heartbeat) -> bool:
    """Whether the process that wrote the heartbeat exists: one that began after it is another one."""
    try:
        process = psutil.Process(heartbeat.pid)
        is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not is_dead and process.create_time() <= heartbeat.at + 1.0
    except psutil.Error:
        return False
