"""A question to the planner, and layouts with their predicted memory and time."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.offload import HOST_SHARE
from meshwright.plan.memory.rank_bytes import MANY_LAYOUTS, Memory, memory
from meshwright.plan.search.pins import Pins
from meshwright.plan.time.step_time import StepCost, step_cost
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.run import RunSpec

Objective = Literal["speed", "cost", "memory"]
PLANNED_SHARE = 0.95
"""Predicted memory is off by a few per cent, and a plan that runs out of memory is worth nothing."""
MIN_CP_POSITIONS = 8192
"""Context parallel is for long context: the first pass goes down to this many positions per rank."""
MIN_CP_POSITIONS_TO_SAVE = 1024
"""The same limit in the second pass, which prices what saves memory where that makes the plan faster."""


FAR = 1e6
"""Beyond every use of host memory, in `distance`."""


@dataclass(frozen=True)
class Question:
    """What to plan: a run whose layout is open, the cluster, the pins, and the objective."""

    run: RunSpec
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    objective: Objective = "speed"
    min_cp_positions: int = MIN_CP_POSITIONS
    """Positions of a sequence that each cp rank keeps at least."""
    allow: tuple[str, ...] = ()
    """Changes of number formats and optimizer that the plan may make, by their names in `--allow`."""
    memory_share: float = PLANNED_SHARE
    """The part of the device's memory that may be used."""
    module_runtime: Framework | None = None
    """Prices a user module in the place of our own blocks; None for a model of ours."""
    from_trained: bool = False
    """Whether training goes on from trained weights, which the run may not name yet."""

    @cached_property
    def workload(self) -> Workload:
        """What is trained, independent of the layout."""
        return workload_of(self.run)

    @cached_property
    def framework(self) -> Framework:
        """Our own runtime with the number formats of the run, or with a user module."""
        return self.module_runtime or runtime_of(self.run)

    @property
    def memory_budget_bytes(self) -> float:
        """Bytes of a device that may be used."""
        return self.memory_share * self.cluster.device.memory_bytes

    @property
    def host_budget_bytes(self) -> float:
        """Bytes of host memory that each rank of a node may use."""
        return HOST_SHARE * self.cluster.host_memory_bytes / self.cluster.devices_per_node

    @property
    def may_offload(self) -> bool:
        """Whether the search may use host memory: on accelerators, unless the user set memory.offload."""
        is_set = bool(self.run.memory.offload) or self.pins.override_of("memory.offload") is not None
        return self.cluster.device.name != "cpu" and not is_set


@dataclass(frozen=True)
class Priced:
    """Layouts with their predicted memory and step time; every array has shape (N,)."""

    layouts: Layouts
    device_bytes: Floats
    step_seconds: Floats

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def device_seconds(self) -> Floats:
        """Step time times devices: the cost of a step."""
        return self.step_seconds * self.layouts.num_ranks

    def take(self, index: object) -> "Priced":
        """The layouts at these positions, or where a mask is true."""
        rows = np.asarray(index)
        return Priced(
            self.layouts.take(rows),
            np.atleast_1d(self.device_bytes[rows]),
            np.atleast_1d(self.step_seconds[rows]),
        )

    def score(self, objective: Objective) -> Floats:
        """The value that the objective minimises."""
        if objective == "cost":
            return self.device_seconds
        return self.device_bytes if objective == "memory" else self.step_seconds


def price_memory(
    question: Question, layouts: Layouts, *, limit: int = MANY_LAYOUTS, budget: float = np.inf
) -> Memory:
    """Bytes of these layouts on our runtime; less for some that do not fit (`rank_bytes.memory`)."""
    return memory(
        question.workload, layouts, question.cluster, question.framework, limit=limit, budget=budget
    )


def price_time(question: Question, layouts: Layouts) -> StepCost:
    """Seconds of these layouts on our runtime, in closed form."""
    return step_cost(question.workload, layouts, question.cluster, question.framework)


def price(question: Question, layouts: Layouts) -> Priced:
    """Memory and time of these layouts, whether they fit or not."""
    device_bytes = price_memory(question, layouts).peak_device_bytes
    return Priced(layouts, device_bytes, price_time(question, layouts).step_seconds)


def memory_use(question: Question, needed: Memory) -> Floats:
    """Needed over usable bytes, of the device or of its host, whichever is scarcer; at most 1 fits."""
    on_device = needed.peak_device_bytes / question.memory_budget_bytes
    return np.maximum(on_device, needed.peak_host_bytes / question.host_budget_bytes)


def distance(question: Question, needed: Memory) -> Floats:
    """How far layouts are from fitting: those that fit the device come first, by their use of the host."""
    on_device = needed.peak_device_bytes / question.memory_budget_bytes
    return np.where(on_device <= 1.0, memory_use(question, needed), FAR + on_device)


def fitting_rows(question: Question, needed: Memory) -> NDArray[np.bool_]:
    """Whether each layout fits into the usable memory of its devices and of their hosts."""
    return memory_use(question, needed) <= 1.0
