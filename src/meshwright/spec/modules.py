"""Specs for user modules (`fit`, `prepare`): everything of a run except the model and its tokens."""

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Fraction, NonNegative, Positive, PositiveNumber, Spec
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.launch import LaunchSpec
from meshwright.spec.memory import MemorySpec
from meshwright.spec.observe import ObserveSpec
from meshwright.spec.optim import OptimSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.resilience import ResilienceSpec
from meshwright.spec.schedule import ScheduleSpec

DeviceKind = Literal["auto", "cpu", "cuda"]
Readers = Literal["auto", "one", "all"]
"""Which of the ranks that compute on the same samples read them: see `SamplesSpec.readers`."""


class ModuleSpec(Spec):
    """How any `nn.Module` is distributed over ranks, computed and saved."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run directory, runs/<name>."""
    seed: NonNegative = 0
    """Seed of the order of samples and of dropout; the weights are the module's own."""
    deterministic: bool = False
    """Two runs of the same spec have bitwise equal losses, at some cost in speed."""
    device: DeviceKind = "auto"
    """auto: CUDA if there is a device, otherwise the CPU."""
    compile: bool = False
    """Compile each block with torch.compile."""
    blocks: str | None = None
    """Name pattern of the modules that are recomputed, compiled and gathered one at a time, such as
    `encoder.layer.*`; absent: lists of modules of one class are found."""
    sync_batch_norm: bool = False
    """Batch norm uses statistics over all data-parallel ranks; false: each rank uses its own samples."""
    parallel: ParallelSpec = ParallelSpec()
    precision: PrecisionSpec = PrecisionSpec()
    memory: MemorySpec = MemorySpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    launch: LaunchSpec = LaunchSpec()

    def trajectory_fingerprint(self) -> str:
        """A fingerprint that is equal for two specs whose runs have the same states; see `RunSpec`."""
        return self.with_(**self._neutral_fields()).fingerprint()

    def _neutral_fields(self) -> dict[str, object]:
        """The fields that may differ between two sessions of one run, each at a fixed value."""
        return {
            "name": "run",
            "device": "auto",
            "compile": False,
            "blocks": None,
            "parallel": ParallelSpec(),
            "memory": MemorySpec(),
            "checkpoint": CheckpointSpec(),
            "launch": LaunchSpec(),
        }


class LoopSpec(ModuleSpec):
    """The spec of a user's own training loop (`meshwright.prepare`)."""

    accumulation: Positive = 1
    """Gradient accumulation: batches of the loader, on each rank, per optimizer step."""
    max_grad_norm: PositiveNumber | None = None
    """Gradients are clipped to this global norm; null does not clip."""
    ema_decay: Fraction | None = None
    """Exponential moving average of the weights, updated after each step that was not skipped."""
    optim: OptimSpec | None = None
    """A built-in optimizer; absent: the loop has its own torch optimizer."""
    readers: Readers = "auto"
    """Which of the tp ranks, which compute on the same batches, read them. one: the first reads each batch
    once and broadcasts it; all: each reads for itself; auto: measures both on a few samples at the start,
    chooses, and prints the choice (of an iterable that is not a DataLoader: all)."""

    def _neutral_fields(self) -> dict[str, object]:
        # More ranks with fewer batches each have the same global batch.
        return {**super()._neutral_fields(), "accumulation": 1, "readers": "auto"}


class SamplesSpec(Spec):
    """How the samples of a dataset are ordered and batched."""

    batch_samples: Positive
    """Global batch: samples per optimizer step over all ranks."""
    microbatch_samples: Positive | None = None
    """Samples of one forward pass on one data-parallel rank; absent: the rank's full part of the batch."""
    shuffle: bool = True
    """Shuffle samples with the seed, differently in each epoch; false reads them in order."""
    max_epochs: Positive | None = None
    """The run ends after this many epochs, with a short last batch; null repeats the samples without end."""
    num_workers: NonNegative | Literal["auto"] = 0
    """Worker processes of each rank that prefetch batches; 0 loads them in the training process; auto reads a
    few samples at the start, chooses, and prints the choice."""
    on_device: bool = False
    """Read every sample once at the start and keep all of them on the device (on a CPU: in memory); for small
    datasets without random transforms."""
    readers: Readers = "auto"
    """Which of the ranks that compute on the same samples (tp, cp and pp ranks of one dp rank) read and
    decode them. one: the first reads each sample once and broadcasts it; all: each reads for itself;
    auto: measures both on a few samples at the start, chooses, and prints the choice."""
    sample_tokens: Positive = 1
    """Tokens of one sample, for the `tokens` metric (1: it counts samples)."""

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_samples * self.sample_tokens

    def batch_tokens_of(self, batch_index: int) -> int:
        """Tokens of a batch by its index; all batches have the same."""
        del batch_index
        return self.batch_tokens


class FitSpec(ModuleSpec):
    """The spec of `meshwright.fit`, which trains a module on a dataset with a loss."""

    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec
    data: SamplesSpec
    observe: ObserveSpec = ObserveSpec()
    resilience: ResilienceSpec = ResilienceSpec()

    @property
    def microbatch_samples(self) -> int:
        """Samples of one forward pass on one data-parallel rank."""
        return self.data.microbatch_samples or max(1, self.data.batch_samples // self.parallel.dp)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on one data-parallel rank."""
        return self.data.batch_samples // (self.microbatch_samples * self.parallel.dp)

    def _neutral_fields(self) -> dict[str, object]:
        can_extend = self.schedule.kind in ("constant", "inverse_sqrt")
        return {
            **super()._neutral_fields(),
            "data": self.data.with_(microbatch_samples=None, num_workers=0, on_device=False, readers="auto"),
            "schedule": self.schedule.with_(num_steps=10**12) if can_extend else self.schedule,
            "observe": ObserveSpec(),
            "resilience": ResilienceSpec(),
        }
