"""The spec of a run: everything that a run file contains, in one frozen value."""

from typing import Literal

from pydantic import Field

from meshwright.spec.adapter import AdapterSpec
from meshwright.spec.base import NonNegative, Spec
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.data import DataSpec
from meshwright.spec.launch import LaunchSpec
from meshwright.spec.memory import MemorySpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.observe import ObserveSpec
from meshwright.spec.optim import OptimSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.preference import PreferenceSpec
from meshwright.spec.resilience import ResilienceSpec
from meshwright.spec.schedule import ScheduleSpec

RUN_VERSION = 2


class RunSpec(Spec):
    """Everything that decides what a run computes, and nothing else."""

    version: Literal[2] = RUN_VERSION
    """Version of the run-file format; an older file is refused with the new names of its keys."""
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run directory, runs/<name>."""
    seed: NonNegative = 0
    """Everything random (weights, order of samples, dropout) follows from it."""
    deterministic: bool = False
    """The same run twice gives bitwise equal losses, at some cost in speed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device, otherwise the CPU."""
    compile: bool = False
    """Compile each block with torch.compile."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch once and replay it: for small models and micro-batches,
    where the host launches kernels more slowly than the device runs them."""
    model: ModelSpec
    adapter: AdapterSpec | None = None
    """Low-rank adapters (LoRA) on frozen weights, which `checkpoint.start_from` names; null trains the model
    itself."""
    train_only: tuple[str, ...] = ()
    """Shell patterns over parameter names, such as `blocks.3?.*` or `*norm*`: only these are trained, and all
    others are frozen. With adapters: parameters that are trained in full beside them. Empty: without
    adapters everything is trained."""
    parallel: ParallelSpec = ParallelSpec()
    precision: PrecisionSpec = PrecisionSpec()
    memory: MemorySpec = MemorySpec()
    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec
    data: DataSpec
    preference: PreferenceSpec | None = None
    """Train on pairs of answers (DPO); null trains on all targets of the data."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    observe: ObserveSpec = ObserveSpec()
    resilience: ResilienceSpec = ResilienceSpec()
    launch: LaunchSpec = LaunchSpec()

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on one data-parallel rank."""
        return self.data.batch_sequences // (self.data.microbatch_sequences * self.parallel.dp)

    def each_accumulation(self) -> list[tuple[str, int, int]]:
        """(where, sequences, micro-batches) of every batch size: the final one, then those of the ramp."""
        unit = self.data.microbatch_sequences * self.parallel.dp
        sizes = [("data.batch_sequences", self.data.batch_sequences)]
        sizes += [
            (f"data.batch_ramp.{index}.batch_sequences", part.batch_sequences)
            for index, part in enumerate(self.data.batch_ramp)
        ]
        return [(where, sequences, sequences // unit) for where, sequences in sizes]

    @property
    def is_finetuning(self) -> bool:
        """Whether training goes on from trained weights: laws of training from scratch do not apply."""
        return self.adapter is not None or self.checkpoint.start_from is not None

    @property
    def has_shards_on_host(self) -> bool:
        """Whether ZeRO-3 shards, gradients and optimizer states live in host memory and are updated there."""
        return self.parallel.zero == 3 and "parameters" in self.memory.offload

    def trajectory_fingerprint(self) -> str:
        """A fingerprint that is equal for two specs whose runs have the same states; a checkpoint records it.

        The mesh, the micro-batch, the dtype of weights, gradients and moments, fp8, and how often something
        is written may differ between the two. Model, data, optimizer, seed and the dtype of matmuls may not,
        and more steps only where the learning rate of earlier steps stays the same. Which settings a run may
        change on its way is in `spec/changes.py`.
        """
        can_extend = self.schedule.kind in ("constant", "inverse_sqrt")
        same_trajectory = self.with_(
            name="run",
            device="auto",
            compile=False,
            cuda_graphs=False,
            parallel=ParallelSpec(),
            memory=MemorySpec(),
            precision=self.precision.with_(weights="fp32", gradients="fp32", fp8=None),
            optim=self.optim.with_(state="fp32"),
            data=self.data.with_(microbatch_sequences=1),
            schedule=self.schedule.with_(num_steps=10**12) if can_extend else self.schedule,
            checkpoint=CheckpointSpec(
                start_from=self.checkpoint.start_from, new_tokens=self.checkpoint.new_tokens
            ),
            observe=ObserveSpec(),
            resilience=ResilienceSpec(bad_steps=self.resilience.bad_steps),
            launch=LaunchSpec(),
        )
        return same_trajectory.fingerprint()
