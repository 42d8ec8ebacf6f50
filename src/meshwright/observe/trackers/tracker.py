"""What a tracker is, and what it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Ending = Literal["finished", "interrupted", "failed"]


class Row(NamedTuple):
    """The scalars of one step."""

    step: int
    time: float
    """Seconds since 1970."""
    scalars: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told about a run before its first step; plain values only."""

    name: str
    run_dir: Path
    settings: Mapping[str, Any]
    """The resolved run, with dotted keys."""
    facts: Mapping[str, Any]
    """Device, ranks, host, parameters and versions."""


class Tracker(Protocol):
    """One run in a tracker. Its methods may block and may raise."""

    @property
    def run_id(self) -> str:
        """The identity of the run in the tracker, with which a resume continues it."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Send the scalars of these steps."""
        ...

    def close(self, ending: Ending) -> None:
        """Send what is left, and how the run ended."""
        ...
