"""Where the time of a rank goes, by the phases that its heartbeats name. Imports no torch."""

import time
from collections.abc import Callable

import psutil

from meshwright.spec.resilience import Phase


class PhaseClock:
    """Seconds of this process in each phase."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.began_at = psutil.Process().create_time()
        """Start of this process in seconds since 1970."""
        self.build_seconds = max(0.0, time.time() - self.began_at)
        """From the start of the process to this clock: imports, building, loading a checkpoint."""
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase = "start"
        self._entered_at = monotonic()

    def enter(self, phase: Phase) -> None:
        """Count the time since the last call for the phase before, and begin this one."""
        now = self._monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered_at
        self._phase, self._entered_at = phase, now

    def seconds(self, phase: Phase) -> float:
        """Seconds in a phase so far, the one in progress included."""
        running = self._monotonic() - self._entered_at if phase == self._phase else 0.0
        return self._seconds.get(phase, 0.0) + running
