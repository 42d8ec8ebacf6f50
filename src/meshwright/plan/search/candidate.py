"""One layout with everything that is predicted about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.margins import Margin, memory_margin
from meshwright.plan.memory.rank_bytes import FIT_SHARE, STAGES, Memory
from meshwright.plan.predict import layout_of
from meshwright.plan.search.question import Question, fitting_rows, price_memory, price_time
from meshwright.plan.time.interval import interval_source
from meshwright.plan.time.pipeline import simulated_items
from meshwright.plan.time.step_time import StepCost
from meshwright.plan.workload.layouts import OFFLOAD_BITS, RECOMPUTE_BITS, Floats, Layouts
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes

RECOMPUTE_NAMES = {bits: name for name, bits in RECOMPUTE_BITS.items()}
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Candidate:
    """One layout of a question; bytes are those of the pipeline rank with the highest peak."""

    question: Question
    layout: Layouts
    """A table with this layout as its only row."""
    priced: tuple[StepCost | None, Memory | None] = field(default=(None, None), repr=False, compare=False)
    """Its cost and memory where they are known already."""

    @cached_property
    def run(self) -> RunSpec:
        """The complete run with this layout."""
        return with_layout(self.question.run, self.layout)

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the first, a middle and the last pipeline rank."""
        return self.priced[1] or price_memory(self.question, self.layout)

    @cached_property
    def cost(self) -> StepCost:
        """Seconds of a step in closed form."""
        return self.priced[0] or price_time(self.question, self.layout)

    @property
    def memory_items(self) -> dict[str, dict[str, float]]:
        """Device bytes by item for the first, a middle and the last pipeline rank."""
        found = self.memory
        return _by_stage({**found.items, "fragmentation": found.fragmentation, **found.outside})

    @property
    def host_items(self) -> dict[str, dict[str, float]]:
        """Bytes in host memory by item, for the same ranks."""
        return _by_stage(self.memory.host)

    @property
    def device_bytes(self) -> float:
        """Peak bytes on the device: the allocator, the context and the communicators."""
        return float(self.memory.peak_device_bytes[0])

    @property
    def reserved_bytes(self) -> float:
        """Peak bytes that torch's allocator reserves."""
        return float(self.memory.peak_reserved_bytes[0])

    @property
    def allocated_bytes(self) -> float:
        """Peak bytes of tensors."""
        return float(self.memory.peak_allocated_bytes[0])

    @property
    def excess_bytes(self) -> float:
        """Device bytes beyond what may be used; negative where some are left."""
        return self.device_bytes - self.question.memory_budget_bytes

    @property
    def host_bytes(self) -> float:
        """Bytes that a rank keeps in host memory."""
        return sum(self.host_items[self.peak_stage].values())

    @property
    def over_limit_text(self) -> str:
        """How far the layout is over the limit of device or host memory; empty where it fits."""
        if self.excess_bytes > 0:
            return f"{show_bytes(self.device_bytes)}, {show_bytes(self.excess_bytes)} too much"
        if self.fits:
            return ""
        cluster = self.question.cluster
        return (
            f"{show_bytes(self.peak_host_bytes)} of host memory per rank of "
            f"{show_bytes(self.question.host_budget_bytes)} ({host_memory_text(cluster)})"
        )

    @property
    def peak_host_bytes(self) -> float:
        """Bytes of host memory of the rank that keeps most there."""
        return float(self.memory.peak_host_bytes[0])

    @property
    def score(self) -> float:
        """The value that the objective minimises, with the pipeline simulated."""
        objective = self.question.objective
        if objective == "memory":
            return self.device_bytes
        return self.step_seconds * (self.num_ranks if objective == "cost" else 1)

    @property
    def peak_stage(self) -> str:
        """The pipeline rank with the highest peak: first, middle or last."""
        return STAGES[int(self.memory.peak_stage[0])]

    @property
    def memory_margin(self) -> Margin | None:
        """How far allocated bytes may be off, in both directions."""
        return memory_margin(self.question.workload, self.layout, self.question.framework)

    @cached_property
    def seconds_items(self) -> dict[str, float]:
        """Seconds of a step by item, the pipeline simulated; they sum to `step_seconds`."""
        items = {name: float(np.atleast_1d(column)[0]) for name, column in self.cost.items.items()}
        return simulated_items(self.run, self.question.workload, self.layout, self.cost, items)

    @property
    def interval_seconds(self) -> tuple[float, float]:
        """The 90% interval of the step time."""
        half_width = float(np.atleast_1d(self.cost.relative_half_width)[0])
        return self.step_seconds / (1.0 + half_width), self.step_seconds * (1.0 + half_width)

    @property
    def interval_source(self) -> str:
        """Where the interval comes from: our own measurements, or published runs of this kind."""
        return interval_source(self.question.workload, self.question.cluster, self.num_ranks)

    @property
    def fits(self) -> bool:
        """Whether it stays inside the memory of the device and of the host that the question may use."""
        return bool(fitting_rows(self.question, self.memory)[0])

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.seconds_items.values())

    @property
    def num_ranks(self) -> int:
        """Devices in use."""
        return int(self.layout.num_ranks[0])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.question.run.data.batch_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the data sheet's dense peak."""
        workload = self.question.workload
        peak = self.num_ranks * self.question.cluster.device.peak(workload.matmul_rate)
        return self.tokens_per_second * workload.model_flops_per_token / peak

    def with_columns(self, **columns: int) -> "Candidate":
        """The candidate with these values of its layout."""
        changed = {name: np.array([value], dtype=np.int64) for name, value in columns.items()}
        return Candidate(self.question, replace(self.layout, **changed))

    def days(self, tokens: int) -> float:
        """Days to train this many tokens without interruption."""
        return tokens / self.tokens_per_second / SECONDS_PER_DAY

    def device_hours(self, tokens: int) -> float:
        """Devices times hours for this many tokens."""
        return self.days(tokens) * 24.0 * self.num_ranks


def candidates(question: Question, layouts: Layouts, *, with_memory: bool = False) -> list[Candidate]:
    """A candidate for each layout, priced together, which takes hardly longer than one of them."""
    if len(layouts) == 0:
        return []
    cost = price_time(question, layouts)
    memory = price_memory(question, layouts) if with_memory else None
    return [
        Candidate(question, layouts.take([row]), (cost.row(row), memory.row(row) if memory else None))
        for row in range(len(layouts))
    ]


def host_memory_text(cluster: Cluster) -> str:
    """How much memory the hosts of a cluster have, and whether this is known: `1.0 TiB per node, assumed`."""
    assumed = "" if "host_memory_bytes" in cluster.sources else ", assumed"
    return f"{show_bytes(cluster.host_memory_bytes)} per node{assumed}"


def layout_text(run: RunSpec) -> str:
    """`dp_shard=8 zero=3 tp=4 micro=1x32 recompute=selective`: the settings that are not the default.

    `micro=1x32`: micro-batches of one sequence, 32 of them per step on every data-parallel rank.
    """
    default = ParallelSpec().model_dump()
    parts = [f"{name}={value}" for name, value in run.parallel.model_dump().items() if value != default[name]]
    if run.parallel.pp > 1 and run.parallel.schedule == "1f1b":
        parts.append("schedule=1f1b")
    parts.append(f"micro={run.data.microbatch_sequences}x{run.accumulation}")
    if run.memory.recompute != "none":
        every = f"/{run.memory.recompute_every}" if run.memory.recompute_every > 1 else ""
        parts.append(f"recompute={run.memory.recompute}{every}")
    if run.memory.offload:
        parts.append(f"offload={'+'.join(run.memory.offload)}")
    return " ".join(parts) if run.parallel.num_ranks > 1 else f"one device {' '.join(parts)}"


def _by_stage(items: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
    return {
        stage: {name: float(column[0, index]) for name, column in items.items()}
        for index, stage in enumerate(STAGES)
    }


def with_layout(run: RunSpec, layout: Layouts) -> RunSpec:
    """The run with the first layout of a table."""
    bits = int(layout.recompute[0])
    memory = run.memory.with_(
        recompute=RECOMPUTE_NAMES[bits],
        recompute_every=int(layout.recompute_every[0]) if bits else 1,
        offload=[name for name, bit in OFFLOAD_BITS.items() if int(layout.offload[0]) & bit],
    )
    data = run.data.with_(microbatch_sequences=int(layout.microbatch_sequences[0]))
    return run.with_(parallel=layout.parallel(0), memory=memory, data=data)


def candidate_of(run: RunSpec, cluster: Cluster, module_runtime: Framework | None = None) -> Candidate:
    """The layout of this run on this cluster, judged like `predict`: by all usable memory of the device."""
    question = Question(run, cluster, memory_share=FIT_SHARE, module_runtime=module_runtime)
    return Candidate(question, layout_of(run))
