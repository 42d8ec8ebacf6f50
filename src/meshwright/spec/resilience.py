"""Timeouts and restarts: when a run without progress is ended, and how often its ranks are started again."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, StrictBool

from meshwright.spec.base import NonNegative, Positive, Spec
from meshwright.units import parse_number

Phase = Literal["start", "step", "evaluate", "save", "end"]
"""What a rank is doing: building and the first step, a later step, an evaluation, a save, or leaving."""
Seconds = Annotated[float, Field(ge=1, le=10_000_000, allow_inf_nan=False), BeforeValidator(parse_number)]
BadStepAction = Literal["stop", "skip", "rollback"]
ReplayAction = Literal["warn", "stop", "restart"]
SpikeFactor = Annotated[float, Field(gt=1, allow_inf_nan=False), BeforeValidator(parse_number)]
StragglerFactor = Annotated[float, Field(gt=1, allow_inf_nan=False), BeforeValidator(parse_number)]
HangFactor = Annotated[float, Field(ge=2, allow_inf_nan=False), BeforeValidator(parse_number)]
Delay = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False), BeforeValidator(parse_number)]


class RestartSpec(Spec):
    """How the process that started the ranks restarts them after a crash, a kill or a hang."""

    max_restarts: NonNegative = 100
    """Restarts of all ranks by one `meshwright train`; 0 ends the run at the first failure."""
    max_cycles_without_progress: Positive = 3
    """Starts in a row that end without a newer checkpoint; the run then ends with exit code 93."""
    backoff_seconds: Delay = 1.0
    """Wait before a restart after a cycle without progress; doubles with each further one. A restart after
    progress comes at once."""
    max_backoff_seconds: Delay = 60.0
    """Longest wait before a restart."""
    single_rank: StrictBool = False
    """Watch and restart a run of one rank too: it then trains in a process of its own."""


class ElasticSpec(Spec):
    """How a run goes on with fewer ranks, and with all of them again. The global batch stays the same."""

    min_ranks: Positive = 1
    """Fewest ranks that the run goes on with; the mesh in `parallel` is the largest."""
    spare_ranks: NonNegative = 0
    """Devices beyond those of the mesh (hot spares), which replace devices that are left out."""
    failures_per_device: Positive = 2
    """Failures in a row of ranks on the same device before that device is left out."""
    return_seconds: Delay = 600.0
    """A device that was left out is used again after this time; doubles each time it is left out."""
    node_grace_seconds: Seconds = 15.0
    """Several nodes: one without a sign of life for this time is left out, until it is back."""


class BadStepSpec(Spec):
    """What happens at a step whose gradients are not finite, or whose gradient norm or loss is a spike."""

    action: BadStepAction = "stop"
    """stop: the run ends before the next save. skip: no update is made with this batch. rollback: the run
    goes back to its newest checkpoint and skips the data since, that batch included. skip and rollback read
    the gradient norm on the host in every step."""
    spike_factor: SpikeFactor | None = None
    """A gradient norm above this factor times its running average is a spike; null: only norms that are not
    finite are bad."""
    loss_spike_factor: SpikeFactor | None = None
    """A loss above this factor times its running average is a spike, too; null: the loss is not looked at."""
    max_in_a_row: Positive = 5
    """Bad steps without a good one in between, or rollbacks to the same checkpoint, before the run ends."""


class ReplaySpec(Spec):
    """How often forward and backward of a step run twice to find silent corruption (step replay)."""

    every_steps: Positive = 100
    """Steps between two that run forward and backward twice, before the update."""
    on_difference: ReplayAction = "restart"
    """warn: a difference is logged, and training goes on. stop: the run ends with code 4.
    restart: all ranks are restarted from the newest checkpoint."""


class ResilienceSpec(Spec):
    """When ranks that make no progress are ended, and how often all ranks are restarted."""

    step_timeout_seconds: Seconds = 600.0
    """Longest time of one step; a stopped or hanging rank is ended after it."""
    start_timeout_seconds: Seconds = 1800.0
    """Longest time from the start of the ranks to the end of the first step, compilation included."""
    evaluate_timeout_seconds: Seconds | None = None
    """Longest time of an evaluation; null: the longer of the two timeouts above."""
    save_timeout_seconds: Seconds | None = None
    """Longest time in which training stands still for a save; null: the longer of the two timeouts above."""
    hang_factor: HangFactor | None = 20.0
    """A rank that `meshwright train` started hangs when it makes no progress for this many times its longest
    step so far, at least 60 seconds. null, and with compile=true: only after step_timeout_seconds."""
    compare_replicas_every_steps: Positive | None = None
    """Steps between comparisons of the weights of replicas (dp_replicate), bit for bit: a difference is
    silent corruption, and all ranks are restarted from the newest checkpoint. null: never."""
    replay: ReplaySpec | None = None
    """Every so many steps forward and backward run twice, and loss and gradients must be equal bit for bit;
    needs deterministic=true. null: never."""
    data_retries: NonNegative = 3
    """Times that all ranks wait and read a batch again, inside their processes, where one of them cannot read
    it; the wait is 1 second, doubled each time. Then that rank ends with its error."""
    straggler_factor: StragglerFactor | None = 1.5
    """A rank whose own time of a step is this many times the median of the others, in most of the last twelve
    seconds or more, is reported as a straggler; null: nobody looks."""
    restart: RestartSpec = RestartSpec()
    elastic: ElasticSpec | None = None
    """Go on with fewer ranks where a device keeps failing; null: the number of ranks is fixed."""
    bad_steps: BadStepSpec = BadStepSpec()

    @property
    def longest_seconds(self) -> float:
        """The longest timeout: the limit of a single collective."""
        return max(self.timeout_seconds(phase) for phase in get_args(Phase))

    def timeout_seconds(self, phase: Phase) -> float:
        """Longest time without progress in a phase."""
        return getattr(self, self.timeout_key(phase))

    def timeout_key(self, phase: Phase) -> str:
        """The field that sets the timeout of a phase."""
        own = f"{phase}_timeout_seconds"
        if phase != "end" and getattr(self, own) is not None:
            return own
        is_start = self.start_timeout_seconds >= self.step_timeout_seconds
        return "start_timeout_seconds" if is_start else "step_timeout_seconds"
