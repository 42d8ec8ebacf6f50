"""A simulated run on a large cluster: failures drawn at random, and the supervisor's own decisions.

`supervisor.decide` is what `meshwright train` uses; here attempts take no time, and the clock is a number.
Imports no torch.
"""

import random
from dataclasses import dataclass, field

from meshwright.errors import EXIT_RUN_FAILED
from meshwright.launch.attempt import AttemptEnd, Cause
from meshwright.resilience.supervisor import End, History, decide
from meshwright.spec.resilience import RestartSpec


@dataclass(frozen=True)
class SimulatedRun:
    """A run and the cluster it is on, as far as failures and checkpoints matter. Times are in seconds."""

    num_steps: int
    step_seconds: float
    checkpoint_every_steps: int
    checkpoint_stall_seconds: float
    """How long training stands still for a checkpoint."""
    mean_seconds_between_failures: float
    """Of the cluster, not of one device."""
    detect_seconds: float
    """From a crash until the supervisor has ended all ranks."""
    hang_seconds: float
    """The same for a hang: the timeout."""
    hang_share: float
    """Share of failures that are hangs."""
    restart_seconds: float
    """From the start of the ranks to the first step."""
    fails_after_step: int | None = None
    """A step that no attempt gets past, such as one whose data makes a rank crash."""
    policy: RestartSpec = field(default_factory=RestartSpec)


@dataclass
class Account:
    """Where the time went, in seconds by cause."""

    useful: float = 0.0
    checkpoint: float = 0.0
    lost: float = 0.0
    """Steps, and their checkpoints' stalls, that were not saved."""
    detect: float = 0.0
    restart: float = 0.0
    backoff: float = 0.0
    failures: int = 0
    restarts: int = 0
    lost_steps: int = 0
    end: End | None = field(default=None)

    @property
    def wall(self) -> float:
        """Wall time of the run."""
        return self.useful + self.checkpoint + self.lost + self.detect + self.restart + self.backoff

    @property
    def goodput(self) -> float:
        """Time of steps that count / wall time."""
        return self.useful / self.wall if self.wall else 0.0


def simulate(run: SimulatedRun, *, seed: int) -> Account:
    """Run to the last step, or to the supervisor's end; the same seed gives the same failures."""
    rng, account, history = random.Random(seed), Account(), History()
    while True:
        ended, published = _attempt(run, account, history.published_step, rng)
        history, action = decide(history, ended, run.policy, published_step=published)
        if isinstance(action, End):
            account.end, account.lost_steps = action, history.lost_steps
            return account
        account.restarts, account.backoff = action.number, account.backoff + action.delay_seconds


def _attempt(
    run: SimulatedRun, account: Account, first_step: int, rng: random.Random
) -> tuple[AttemptEnd, int]:
    """One start of the ranks: how it ended, and the step of the newest checkpoint then."""
    left = rng.expovariate(1.0 / run.mean_seconds_between_failures)
    if left < run.restart_seconds:
        account.restart += left
        return _failure(run, account, None, rng), first_step
    account.restart += run.restart_seconds
    left -= run.restart_seconds
    per_step = run.step_seconds + run.checkpoint_stall_seconds / run.checkpoint_every_steps
    last = min(run.num_steps, run.fails_after_step or run.num_steps)
    reached = min(last, first_step + int(left / per_step))
    published = reached - reached % run.checkpoint_every_steps
    saved = reached if reached == run.num_steps else max(first_step, published)
    account.useful += (saved - first_step) * run.step_seconds
    account.checkpoint += (saved - first_step) * (per_step - run.step_seconds)
    if reached == run.num_steps:
        return AttemptEnd("done", 0, reached_step=reached), saved
    account.lost += (reached - saved) * per_step
    return _failure(run, account, reached, rng), saved


def _failure(run: SimulatedRun, account: Account, reached: int | None, rng: random.Random) -> AttemptEnd:
    cause: Cause = "hang" if rng.random() < run.hang_share else "killed"
    account.failures += 1
    account.detect += run.hang_seconds if cause == "hang" else run.detect_seconds
    return AttemptEnd(cause, EXIT_RUN_FAILED, f"simulated: {cause}", reached)
