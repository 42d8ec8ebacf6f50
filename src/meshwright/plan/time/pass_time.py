"""Seconds of one pass by cause, and the inputs of every formula of time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.time import kernels
from meshwright.plan.time.collectives import Groups, axis_groups
from meshwright.plan.workload.layouts import FULL, Floats, Layouts
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]
"""Seconds by cause."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one forward or backward pass of a layer, the head or the embedding, by cause."""

    compute: Items
    exposed: Items
    """Communication and host time that does not overlap with compute."""

    @property
    def seconds(self) -> Floats:
        """Compute and exposed time together."""
        return sum(self.compute.values()) + sum(self.exposed.values())  # pyright: ignore[reportReturnType]

    def take(self, index: NDArray[np.intp]) -> "PassTime":
        """The times of the layouts at these positions."""
        return PassTime(taken(self.compute, index), taken(self.exposed, index))


@dataclass(frozen=True)
class Context:
    """The inputs of every formula: a workload and a framework on a cluster, over these layouts."""

    workload: Workload
    cluster: Cluster
    framework: Framework
    at: Layouts
    groups: Groups

    @property
    def tokens(self) -> Floats:
        """Tokens of one micro-batch on one rank of cp."""
        return self.at.microbatch_tokens(self.workload.sequence_length)

    def distinct(self, *columns: str) -> tuple["Context", NDArray[np.intp]]:
        """One layout for each combination of values of the columns, and which of them each layout has."""
        at, index = self.at.distinct(*(getattr(self.at, name) for name in columns))
        return context(self.workload, at, self.cluster, self.framework), index

    def recomputes(self, bits: int) -> Floats:
        """Share of the layers that recompute one of these parts; FULL recomputes every part."""
        is_hit = (self.at.recompute & (bits | FULL)) > 0
        return is_hit / self.at.recompute_every

    def copy_seconds(self, num_bytes: Floats) -> Floats:
        """Seconds of a memory-bound kernel that moves so many bytes."""
        return num_bytes / kernels.copy_rate(self.cluster.device)


def context(workload: Workload, at: Layouts, cluster: Cluster, framework: Framework) -> Context:
    """The inputs with the group of every mesh axis on the cluster's links."""
    return Context(workload, cluster, framework, at, axis_groups(at, cluster))


def taken(items: Items, index: NDArray[np.intp]) -> Items:
    """The seconds of the layouts at these positions."""
    return {name: seconds[index] for name, seconds in items.items()}


def total(items: Items) -> Floats:
    """Sum of all items."""
    return sum(items.values())  # pyright: ignore[reportReturnType]


def exposed_seconds(communication: Floats, compute: Floats, overlap: Floats | float) -> Floats:
    """The part of a transfer that is exposed when a share `overlap` of it may run beside this compute."""
    return np.maximum(communication - np.minimum(overlap * communication, compute), 0.0)
