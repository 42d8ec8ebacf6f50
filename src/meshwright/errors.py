"""Every error a person can cause or meet, as one tree.

MeshwrightError            exit
|- SpecError               2   the run file or an override is wrong
|- MeshError               2   the ranks or devices at hand cannot form the mesh
|- DataError               2   a dataset or tokenizer is missing, short or does not match
|- CheckpointError         2   a checkpoint is missing, damaged or of another run
|- LaunchError             2   the launcher or its environment is wrong
|- PlanError               3   it does not fit, or no layout is feasible
`- RunError                4   a run that had started failed
   |- OutOfMemory          4   a rank ran out of memory (5 from one rank to the process that started it)
   `- LostRank             4   another rank has ended or hangs (6 from one rank to its supervisor)

A message is a fact with its values, then where, then what to do. Anything that is not a
MeshwrightError is a fault of ours and exits 70.
"""

import json

EXIT_DONE = 0
EXIT_INPUT = 2
EXIT_NO_FIT = 3
EXIT_RUN_FAILED = 4
EXIT_RANK_OUT_OF_MEMORY = 5
"""Exit status of one rank, for the process that started it; `meshwright train` itself then ends with 4."""
EXIT_RANK_LOST = 6
"""Exit status of a rank that lost another one, for the process that started it and may restart all."""
EXIT_FAULT = 70
EXIT_NO_PROGRESS = 93
"""Restarts brought no newer checkpoint: do not requeue. NVIDIA's ft_launcher uses the same code for it."""
EXIT_INTERRUPTED = 130


class MeshwrightError(Exception):
    """A fact with its values, where it was found, and a hint what to do about it."""

    exit_code = EXIT_INPUT

    def __init__(self, fact: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(fact)
        self.fact = fact
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.fact}{advice}"

    def __reduce__(self) -> tuple[object, ...]:
        """Errors are sent between processes, so they pickle with all three parts."""
        return _rebuild, (type(self), self.fact, self.where, self.hint)


def read_trouble(error: Exception) -> str:
    """Why a file could not be read, without the number and the name that the system's text repeats."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (line {error.lineno}: {error.msg})"
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error)


def _rebuild(kind: type[MeshwrightError], fact: str, where: str, hint: str) -> MeshwrightError:
    return kind(fact, where=where, hint=hint)


class SpecError(MeshwrightError):
    """The run file or an override is wrong."""


class SpecErrors(SpecError):
    """Several violations at once; each keeps its own fact, where and hint."""

    def __init__(self, violations: list[SpecError]) -> None:
        self.violations = violations
        super().__init__(f"{len(violations)} things are wrong")

    def __str__(self) -> str:
        return "\n".join(str(violation) for violation in self.violations)

    def __reduce__(self) -> tuple[object, ...]:
        return SpecErrors, (self.violations,)


class MeshError(MeshwrightError):
    """The ranks or devices at hand cannot form the mesh."""


class DataError(MeshwrightError):
    """A dataset or tokenizer is missing, short, damaged, or does not match the model."""


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class LaunchError(MeshwrightError):
    """The launcher, or the environment it left, is wrong."""


class PlanError(MeshwrightError):
    """It does not fit, or no layout is feasible."""

    exit_code = EXIT_NO_FIT


class RunError(MeshwrightError):
    """A run that had started failed."""

    exit_code = EXIT_RUN_FAILED


class OutOfMemory(RunError):
    """A rank ran out of memory, on its device or on the host."""


class LostRank(RunError):
    """Another rank has ended, or a collective with it took too long; a restart of all ranks may help."""
