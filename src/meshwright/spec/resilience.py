"""Timeouts: how long a run may go without progress before it is ended."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.base import Spec
from meshwright.units import parse_number

Phase = Literal["start", "step", "evaluate", "save", "end"]
"""What a rank is doing: building and the first step, a later step, an evaluation, a save, or leaving."""
Seconds = Annotated[float, Field(ge=1, le=10_000_000, allow_inf_nan=False), BeforeValidator(parse_number)]


class ResilienceSpec(Spec):
    """When a run whose ranks make no progress is ended (exit code 4)."""

    step_timeout_seconds: Seconds = 600.0
    """Longest time of one step; a run with a stopped or hanging rank ends after it."""
    start_timeout_seconds: Seconds = 1800.0
    """Longest time from the start of the ranks to the end of the first step, compilation included."""

    @property
    def longest_seconds(self) -> float:
        """The longer timeout: the limit of an evaluation, of a save and of a single collective."""
        return max(self.step_timeout_seconds, self.start_timeout_seconds)

    def timeout_seconds(self, phase: Phase) -> float:
        """Longest time without progress in a phase."""
        if phase == "step":
            return self.step_timeout_seconds
        return self.start_timeout_seconds if phase == "start" else self.longest_seconds
