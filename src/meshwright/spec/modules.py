"""What is said about a module that is not ours: everything of a run but the model and its tokens."""

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Fraction, NonNegative, Positive, PositiveNumber, Spec
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.memory import MemorySpec
from meshwright.spec.observe import ObserveSpec
from meshwright.spec.optim import OptimSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.schedule import ScheduleSpec


class ModuleSpec(Spec):
    """How any `nn.Module` is spread over ranks, computed and saved."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run directory, runs/<name>."""
    seed: NonNegative = 0
    """Order of samples and dropout follow from it; weights are the module's own."""
    deterministic: bool = False
    """The same run twice gives bitwise equal losses, at some cost in speed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device, otherwise the CPU."""
    compile: bool = False
    """Compile each block with torch.compile."""
    blocks: str | None = None
    """Pattern of the names of the modules that are recomputed, compiled and gathered one at a time, such as
    `encoder.layer.*`; absent: lists of alike modules are found."""
    sync_batch_norm: bool = False
    """Batch norm takes its statistics over all data-parallel ranks; false: each rank over its own samples."""
    parallel: ParallelSpec = ParallelSpec()
    precision: PrecisionSpec = PrecisionSpec()
    memory: MemorySpec = MemorySpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    def trajectory_fingerprint(self) -> str:
        """Equal for two specs whose runs pass through the same states; see `RunSpec`."""
        return self.with_(**self._course()).fingerprint()

    def _course(self) -> dict[str, object]:
        """What may differ between two sessions of one run, at one value."""
        return {
            "name": "run",
            "device": "auto",
            "compile": False,
            "blocks": None,
            "parallel": ParallelSpec(),
            "memory": MemorySpec(),
            "checkpoint": CheckpointSpec(),
        }


class LoopSpec(ModuleSpec):
    """For a training loop of your own (`meshwright.prepare`)."""

    accumulation: Positive = 1
    """Batches of the loader, on each rank, per optimizer step."""
    max_grad_norm: PositiveNumber | None = None
    """Gradients are scaled down to this global norm; null never clips."""
    ema_decay: Fraction | None = None
    """Exponential moving average of the weights, updated after each step that was not skipped."""
    optim: OptimSpec | None = None
    """An update rule of ours; absent: the loop brings its own optimizer."""

    def _course(self) -> dict[str, object]:
        return {**super()._course(), "accumulation": 1}  # more ranks, fewer batches: the same global batch


class SamplesSpec(Spec):
    """How the samples of a dataset are ordered and batched."""

    batch_samples: Positive
    """Global batch: samples per optimizer step over all ranks."""
    microbatch_samples: Positive | None = None
    """Samples of one forward pass on one data-parallel rank; absent: its part of the batch at once."""
    shuffle: bool = True
    """Samples in an order drawn from the seed, anew each epoch; false takes them as they lie."""
    max_epochs: Positive | None = None
    """None: start over when the samples are used up; else the run ends there, with a short last batch."""
    num_workers: NonNegative = 0
    """Processes of each rank that make batches ahead; 0 makes them in between."""
    sample_tokens: Positive = 1
    """Positions of one sample: what `tokens` in the metrics counts (1: samples)."""

    @property
    def batch_tokens(self) -> int:
        """Positions per optimizer step."""
        return self.batch_samples * self.sample_tokens

    def batch_tokens_of(self, batch_index: int) -> int:
        """Positions of a batch by its number: always the same."""
        del batch_index
        return self.batch_tokens


class FitSpec(ModuleSpec):
    """For a module, a dataset and a loss handed to the trainer (`meshwright.fit`)."""

    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec
    data: SamplesSpec
    observe: ObserveSpec = ObserveSpec()

    @property
    def microbatch_samples(self) -> int:
        """Samples of one forward pass on one data-parallel rank."""
        return self.data.microbatch_samples or max(1, self.data.batch_samples // self.parallel.dp)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on one data-parallel rank."""
        return self.data.batch_samples // (self.microbatch_samples * self.parallel.dp)

    def _course(self) -> dict[str, object]:
        can_extend = self.schedule.kind in ("constant", "inverse_sqrt")
        return {
            **super()._course(),
            "data": self.data.with_(microbatch_samples=None, num_workers=0),
            "schedule": self.schedule.with_(num_steps=10**12) if can_extend else self.schedule,
            "observe": ObserveSpec(),
        }
