"""The decisions of a supervisor: attempts that have ended in, restarts and the end of the run out.

Nothing here starts a process or looks at a clock, so the same code runs under `meshwright train`
(`train/supervise.py`) and in a simulation of months on thousands of GPUs (`resilience/simulation.py`).
Imports no torch.
"""

from dataclasses import dataclass, replace

from meshwright.errors import EXIT_NO_PROGRESS, EXIT_RANK_LOST, EXIT_RANK_OUT_OF_MEMORY, EXIT_RUN_FAILED
from meshwright.launch.attempt import AttemptEnd, Cause
from meshwright.spec.resilience import RestartSpec

# A restart meets these again: wrong input stays wrong, and a run that ends with an error of its own says why.
_FINAL: tuple[Cause, ...] = ("done", "stopped", "refused", "failed")


@dataclass(frozen=True)
class History:
    """What is remembered of earlier attempts."""

    published_step: int = 0
    """Step of the newest complete checkpoint."""
    num_restarts: int = 0
    cycles_without_progress: int = 0
    """Attempts in a row that ended without a newer checkpoint."""
    lost_steps: int = 0
    """Steps that were trained and not saved, over all restarts."""


@dataclass(frozen=True)
class Restart:
    """Start all ranks again, after a delay."""

    number: int
    """1 for the first restart after a failure; a change of the number of ranks does not count."""
    delay_seconds: float
    lost_steps: int
    """Steps that are trained once more."""
    has_smaller_microbatch: bool = False
    """Whether the micro-batch is made smaller first, after an OOM."""


@dataclass(frozen=True)
class End:
    """The run ends."""

    code: int
    reason: str = ""
    """Why there is no further restart; empty where the run itself has said why it ended."""


Action = Restart | End


def decide(
    history: History,
    ended: AttemptEnd,
    policy: RestartSpec,
    *,
    published_step: int,
    can_shrink_microbatch: bool = False,
    has_new_mesh: bool = False,
) -> tuple[History, Action]:
    """The history after an attempt, and what to do next.

    `published_step` is the step of the newest complete checkpoint now; `can_shrink_microbatch` whether a run
    that is out of memory may be restarted with a smaller micro-batch; `has_new_mesh` whether a restart has
    other devices or another number of ranks, so that earlier starts say nothing about it.
    """
    code = EXIT_RUN_FAILED if ended.code in (EXIT_RANK_OUT_OF_MEMORY, EXIT_RANK_LOST) else ended.code
    lost = max(0, (ended.reached_step or 0) - published_step)
    now = _after(history, published_step, lost)
    if has_new_mesh:
        now = replace(now, cycles_without_progress=0)
    if ended.cause == "out_of_memory" and can_shrink_microbatch:
        restart = Restart(now.num_restarts + 1, 0.0, lost, has_smaller_microbatch=True)
        return replace(now, num_restarts=restart.number, cycles_without_progress=0), restart
    if ended.cause == "resized":
        return now, Restart(now.num_restarts, 0.0, lost)
    if policy.max_restarts == 0 or ended.cause in (*_FINAL, "out_of_memory"):
        return now, End(code)
    if ended.cause == "error" and ended.reached_step is None:
        return now, End(code, "an error before the first step would come again")
    if now.cycles_without_progress >= policy.max_cycles_without_progress:
        return now, End(EXIT_NO_PROGRESS, _no_progress(now, ended))
    if now.num_restarts >= policy.max_restarts:
        return now, End(code, f"resilience.restart.max_restarts={policy.max_restarts} are used up")
    restart = Restart(now.num_restarts + 1, _delay(now, policy), lost)
    return replace(now, num_restarts=restart.number), restart


def _after(history: History, published_step: int, lost_steps: int) -> History:
    has_progress = published_step > history.published_step
    return replace(
        history,
        published_step=max(published_step, history.published_step),
        cycles_without_progress=0 if has_progress else history.cycles_without_progress + 1,
        lost_steps=history.lost_steps + lost_steps,
    )


def _delay(history: History, policy: RestartSpec) -> float:
    """No wait after progress; then `backoff_seconds`, doubled with each cycle."""
    if history.cycles_without_progress == 0:
        return 0.0
    doubled = policy.backoff_seconds * 2.0 ** min(60, history.cycles_without_progress - 1)
    return min(doubled, policy.max_backoff_seconds)


def _no_progress(history: History, ended: AttemptEnd) -> str:
    return (
        f"{history.cycles_without_progress} starts in a row ended without a newer checkpoint than step "
        f"{history.published_step}; the last one: {ended.text or ended.cause}"
    )
