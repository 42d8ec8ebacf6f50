"""Memory, step time and MFU of exactly one layout: that of a run file."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.margins import Margin, memory_margin
from meshwright.plan.memory.offload import HOST_SHARE
from meshwright.plan.memory.rank_bytes import FIT_SHARE, STAGES, Memory, host_peak_bytes, memory
from meshwright.plan.time.pipeline import simulated_items
from meshwright.plan.time.step_time import step_cost
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import Layouts, one_layout
from meshwright.plan.workload.workload import Workload
from meshwright.spec.run import RunSpec


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline rank."""

    stage: str
    items: Mapping[str, float]
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    host_items: Mapping[str, float]
    """In host memory."""


@dataclass(frozen=True)
class Prediction:
    """What one layout will need and take; seconds are per optimizer step."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    seconds_by_item: Mapping[str, float]
    batch_tokens: int
    num_devices: int
    model_flops_per_token: float
    peak_flops_per_second: float
    stages: tuple[StageMemory, ...]
    capacity_bytes: int
    host_capacity_bytes: float
    """Of one rank."""
    memory_margin: Margin | None = None
    """How far allocated bytes may be off, either way; None where it is not known."""

    @property
    def tokens_per_second_per_device(self) -> float:
        """Trained tokens per second of one device."""
        return self.batch_tokens / (self.step_seconds * self.num_devices)

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s of one device, strict: causal half once, recompute never."""
        return self.tokens_per_second_per_device * self.model_flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the data sheet's dense peak of the precision."""
        return 1e12 * self.tflops_per_device / self.peak_flops_per_second

    @property
    def fullest(self) -> StageMemory:
        """The pipeline rank that needs most."""
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def excess_bytes(self) -> float:
        """What the fullest rank needs beyond the device and its margin; negative where there is room."""
        return self.fullest.device_bytes - FIT_SHARE * self.capacity_bytes

    @property
    def is_uncertain(self) -> bool:
        """Whether the margin of the prediction decides if it fits."""
        if self.memory_margin is None:
            return False
        return abs(self.excess_bytes) < self.memory_margin.of(self.fullest.allocated_bytes)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays inside the device, with a margin for what the estimate misses, and
        what is offloaded inside its part of the host's memory."""
        on_host = max(sum(stage.host_items.values()) for stage in self.stages)
        return self.excess_bytes <= 0 and on_host <= HOST_SHARE * self.host_capacity_bytes


def _stage_memory(found: Memory, at: Layouts) -> tuple[StageMemory, ...]:
    """One entry per distinct pipeline rank: all three are the same without a pipeline."""
    ranks = range(len(STAGES)) if at.pp[0] > 1 else (0,)
    return tuple(
        StageMemory(
            stage=STAGES[k] if at.pp[0] > 1 else "every",
            items={name: float(values[0, k]) for name, values in found.items.items() if values[0, k] > 0},
            allocated_bytes=float(found.allocated_bytes[0, k]),
            reserved_bytes=float(found.reserved_bytes[0, k]),
            device_bytes=float(found.device_bytes[0, k]),
            host_items={name: float(values[0, k]) for name, values in found.host.items() if values[0, k] > 0},
        )
        for k in ranks
    )


def predict_layout(
    work: Workload, at: Layouts, cluster: Cluster, stack: Framework, *, run: RunSpec | None = None
) -> Prediction:
    """Price one layout; with a run file its pipeline is simulated in the runtime's own order and split."""
    cost = step_cost(work, at, cluster, stack)
    items = {name: float(seconds[0]) for name, seconds in cost.items.items()}
    if run is not None:
        items = simulated_items(run, work, at, cost, items)
    seconds, spread = sum(items.values()), 1.0 + float(cost.relative_half_width[0])
    return Prediction(
        step_seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        seconds_by_item={name: value for name, value in items.items() if value > 0},
        batch_tokens=int(at.batch_sequences[0]) * work.sequence_length,
        num_devices=int(at.num_ranks[0]),
        model_flops_per_token=work.model_flops_per_token,
        peak_flops_per_second=cluster.device.peak(work.matmul_rate),
        stages=_stage_memory(memory(work, at, cluster, stack), at),
        capacity_bytes=cluster.device.memory_bytes,
        host_capacity_bytes=cluster.host_memory_bytes / cluster.devices_per_node,
        memory_margin=memory_margin(work, at, stack),
    )


def predict_run(run: RunSpec, cluster: Cluster) -> Prediction:
    """Price a run file on a cluster that has as many devices as the run has ranks."""
    ranks = run.parallel.num_ranks
    if ranks != cluster.num_devices:
        raise SpecError(
            f"the run has {ranks} ranks, {cluster.name} as given has {cluster.num_devices} devices",
            where="--on",
            hint=f"name {ranks} devices, such as {cluster.device.name}:{ranks}, or plan for this cluster",
        )
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return predict_layout(workload_of(run), at, cluster, runtime_of(run), run=run)


def host_bytes(run: RunSpec) -> float:
    """Host memory that `memory.offload` takes on the rank that needs most."""
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return float(host_peak_bytes(workload_of(run), at, runtime_of(run))[0])
