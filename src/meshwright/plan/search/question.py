"""A question to the planner, and layouts with what they need and take."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.rank_bytes import Memory, memory
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.space import MIN_CP_POSITIONS, Space
from meshwright.plan.time.step_time import StepCost, step_cost
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.run import RunSpec

Objective = Literal["speed", "cost", "memory"]
PLANNED_SHARE = 0.95
"""Predicted memory errs by a few per cent, and a plan that runs out of memory is worth nothing."""


@dataclass(frozen=True)
class Question:
    """What to plan: a run whose layout is open, where, what is pinned, and what counts as better."""

    run: RunSpec
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    objective: Objective = "speed"
    min_cp_positions: int = MIN_CP_POSITIONS
    """Positions of a sequence that a rank of cp keeps at least."""
    offloads: bool = False
    """Something lives in host memory."""
    allow: tuple[str, ...] = ()
    """Changes of formats and optimizer that a plan may make, by the words of `--allow`."""

    @property
    def space(self) -> Space:
        """What bounds the enumeration."""
        return Space(self.run, self.cluster, self.pins, self.min_cp_positions, self.offloads)

    @cached_property
    def work(self) -> Workload:
        """What is trained, apart from the layout."""
        return workload_of(self.run)

    @cached_property
    def stack(self) -> Framework:
        """Our runtime in the formats of the run."""
        return runtime_of(self.run)

    @property
    def memory_budget_bytes(self) -> float:
        """What a plan may put on a device: a little less than what might just fit."""
        return PLANNED_SHARE * self.cluster.device.memory_bytes

    @property
    def may_offload(self) -> bool:
        """Whether there is a device apart from the host, and the user has not said what lives where."""
        said = any(word.partition("=")[0].strip() == "memory.offload" for word in self.pins.overrides)
        return self.cluster.device.name != "cpu" and not said and not self.run.memory.offload


@dataclass(frozen=True)
class Priced:
    """Layouts with what they need and take."""

    layouts: Layouts
    device_bytes: Floats
    step_seconds: Floats

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def device_seconds(self) -> Floats:
        """Step time times devices: what a step costs."""
        return self.step_seconds * self.layouts.num_ranks

    def take(self, index: object) -> "Priced":
        """These rows."""
        rows = np.asarray(index)
        return Priced(
            self.layouts.take(rows),
            np.atleast_1d(self.device_bytes[rows]),
            np.atleast_1d(self.step_seconds[rows]),
        )

    def score(self, objective: Objective) -> Floats:
        """What the objective minimises."""
        if objective == "cost":
            return self.device_seconds
        return self.device_bytes if objective == "memory" else self.step_seconds


def price_memory(question: Question, at: Layouts) -> Memory:
    """Bytes of these layouts on our runtime."""
    return memory(question.work, at, question.cluster, question.stack)


def fitting_rows(question: Question, at: Layouts) -> NDArray[np.bool_]:
    """Whether a plan may use these layouts: on the devices and in the memory of their hosts."""
    needed = price_memory(question, at)
    return (needed.peak_device_bytes <= question.memory_budget_bytes) & needed.fits_host(question.cluster)


def price_time(question: Question, at: Layouts) -> StepCost:
    """Seconds of these layouts on our runtime."""
    return step_cost(question.work, at, question.cluster, question.stack)


def price(question: Question, at: Layouts) -> Priced:
    """Both, whether they fit or not."""
    reserved = price_memory(question, at).peak_device_bytes
    return Priced(at, reserved, price_time(question, at).step_seconds)
