"""Memory, step time and MFU of one given layout, such as that of a run file."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.margins import Margin, memory_margin
from meshwright.plan.memory.offload import HOST_SHARE
from meshwright.plan.memory.rank_bytes import FIT_SHARE, STAGES, Memory, host_peak_bytes, memory
from meshwright.plan.time.interval import interval_source
from meshwright.plan.time.pipeline import simulated_items
from meshwright.plan.time.step_time import step_cost
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import Layouts, one_layout
from meshwright.plan.workload.workload import Workload
from meshwright.spec.run import RunSpec
from meshwright.units import show_number


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline rank."""

    stage: str
    items: Mapping[str, float]
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    host_items: Mapping[str, float]
    """Bytes in host memory."""


@dataclass(frozen=True)
class Prediction:
    """Memory and time of one layout; seconds are per optimizer step."""

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
    """Host memory per rank."""
    memory_margin: Margin | None = None
    """How far allocated bytes may be off, in both directions; None where it is not known."""
    interval_source: str = ""
    """Where the interval of our own runtime comes from."""
    assumed: tuple[str, ...] = ()
    """What was assumed about the data."""

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
    def peak_stage(self) -> StageMemory:
        """The pipeline rank with the highest peak."""
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def excess_bytes(self) -> float:
        """Bytes at the peak beyond the usable memory of the device; negative where some are left."""
        return self.peak_stage.device_bytes - FIT_SHARE * self.capacity_bytes

    @property
    def is_uncertain(self) -> bool:
        """Whether the run may fit or not within the error margin of the prediction."""
        if self.memory_margin is None:
            return False
        return abs(self.excess_bytes) < self.memory_margin.of(self.peak_stage.allocated_bytes)

    @property
    def fits(self) -> bool:
        """Whether the peak fits the device, with a margin for the error, and what is offloaded the host."""
        on_host = max(sum(stage.host_items.values()) for stage in self.stages)
        return self.excess_bytes <= 0 and on_host <= HOST_SHARE * self.host_capacity_bytes


def _stage_memory(found: Memory, layout: Layouts) -> tuple[StageMemory, ...]:
    """One entry for the first, a middle and the last pipeline rank; one in all without a pipeline."""
    ranks = range(len(STAGES)) if layout.pp[0] > 1 else (0,)
    return tuple(
        StageMemory(
            stage=STAGES[k] if layout.pp[0] > 1 else "every",
            items={name: float(values[0, k]) for name, values in found.items.items() if values[0, k] > 0},
            allocated_bytes=float(found.allocated_bytes[0, k]),
            reserved_bytes=float(found.reserved_bytes[0, k]),
            device_bytes=float(found.device_bytes[0, k]),
            host_items={name: float(values[0, k]) for name, values in found.host.items() if values[0, k] > 0},
        )
        for k in ranks
    )


def predict_layout(
    workload: Workload, layout: Layouts, cluster: Cluster, framework: Framework, *, run: RunSpec | None = None
) -> Prediction:
    """Price one layout; with a run, its pipeline is simulated in the order and stages of our runtime."""
    cost = step_cost(workload, layout, cluster, framework)
    items = {name: float(seconds[0]) for name, seconds in cost.items.items()}
    if run is not None:
        items = simulated_items(run, workload, layout, cost, items)
    seconds, spread = sum(items.values()), 1.0 + float(cost.relative_half_width[0])
    return Prediction(
        step_seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        seconds_by_item={name: value for name, value in items.items() if value > 0},
        batch_tokens=int(layout.batch_sequences[0]) * workload.sequence_length,
        num_devices=int(layout.num_ranks[0]),
        model_flops_per_token=workload.model_flops_per_token,
        peak_flops_per_second=cluster.device.peak(workload.matmul_rate),
        stages=_stage_memory(memory(workload, layout, cluster, framework), layout),
        capacity_bytes=cluster.device.memory_bytes,
        host_capacity_bytes=cluster.host_memory_bytes / cluster.devices_per_node,
        memory_margin=memory_margin(workload, layout, framework),
        interval_source=interval_source(workload, cluster, int(layout.num_ranks[0])),
        assumed=workload.assumed,
    )


def predict_run(run: RunSpec, cluster: Cluster) -> Prediction:
    """Price a run on a cluster with as many devices as the run has ranks."""
    require_all_devices(run, cluster)
    return predict_layout(workload_of(run), layout_of(run), cluster, runtime_of(run), run=run)


def require_all_devices(run: RunSpec, cluster: Cluster) -> None:
    """SpecError unless the cluster has as many devices as the run has ranks."""
    ranks = run.parallel.num_ranks
    if ranks != cluster.num_devices:
        raise SpecError(
            f"the run has {show_number(ranks, 'rank')}, {cluster.name} as given has "
            f"{show_number(cluster.num_devices, 'device')}",
            where="--on",
            hint=f"name {show_number(ranks, 'device')}, such as {cluster.device.name}:{ranks}, or plan for "
            "this cluster",
        )


def layout_of(run: RunSpec) -> Layouts:
    """The layout of a run, as a table with one row."""
    return one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )


def host_bytes(run: RunSpec) -> float:
    """Bytes of host memory that `memory.offload` needs on the rank with the most of them."""
    return float(host_peak_bytes(workload_of(run), layout_of(run), runtime_of(run))[0])
