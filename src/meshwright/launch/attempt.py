"""How one start of the ranks ended. Imports no torch."""

import signal
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import (
    EXIT_DONE,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NO_FIT,
    EXIT_RANK_LOST,
    EXIT_RANK_OUT_OF_MEMORY,
    EXIT_RUN_FAILED,
)

Cause = Literal[
    "done",
    "stopped",
    "resized",
    "refused",
    "out_of_memory",
    "failed",
    "error",
    "killed",
    "lost_rank",
    "hang",
]
"""Why the ranks have ended: complete, asked to stop, another number of ranks, wrong input, OOM, an error that
the run itself names (a loss that is not finite, a full disk), an exception, a signal, a lost rank on another
host, or no progress."""


@dataclass(frozen=True)
class AttemptEnd:
    """How one start of the ranks ended."""

    cause: Cause
    code: int
    """Exit code of `meshwright train`, if this was the last attempt."""
    text: str = ""
    """One line about the rank whose failure ended the attempt."""
    reached_step: int | None = None
    """Steps that were done, by the last heartbeats; None where no rank got past its first step."""
    failed_rank: int | None = None
    """The rank on this machine, counted from 0, that is to blame; None where several failed alike."""


@dataclass(frozen=True)
class Interruption:
    """Why the ranks of an attempt are to end, though none of them has failed."""

    cause: Cause
    text: str
    code: int = 0
    """Exit code of `meshwright train`, if this is the end of the run."""
    saves: bool = False
    """Whether the ranks save before they end."""


def cause_of(returncode: int, *, is_stopping: bool) -> Cause:
    """The cause that the exit status of the rank that failed first stands for."""
    if returncode == EXIT_DONE:
        return "done"
    if returncode in (EXIT_INTERRUPTED, -signal.SIGINT) or (returncode < 0 and is_stopping):
        return "stopped"
    known: dict[int, Cause] = {
        EXIT_INPUT: "refused",
        EXIT_NO_FIT: "refused",
        EXIT_RUN_FAILED: "failed",
        EXIT_RANK_OUT_OF_MEMORY: "out_of_memory",
        EXIT_RANK_LOST: "lost_rank",
    }
    return "killed" if returncode < 0 else known.get(returncode, "error")
