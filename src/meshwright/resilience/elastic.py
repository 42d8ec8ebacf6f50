"""Fewer ranks, and all of them again: the mesh for a number of ranks, and which devices are left out.

Nothing here starts a process or looks at a clock. Imports no torch.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any, Self

from meshwright.spec import RunSpec
from meshwright.spec.base import Spec
from meshwright.spec.changes import changed_settings
from meshwright.spec.check import check
from meshwright.spec.conditions import CONDITIONS
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.resilience import ElasticSpec


def run_on(run: RunSpec, num_ranks: int, *, multiple_of: int = 1) -> RunSpec | None:
    """The run with the largest valid mesh of at most `num_ranks` ranks; None where there is none of
    `min_ranks` or more.

    pp, cp, tp, ep and the micro-batch stay. dp becomes the largest degree that divides the global batch, so
    each rank accumulates more micro-batches. dp_shard stays where it divides dp; else dp_shard is all of dp.
    """
    least = run.resilience.elastic.min_ranks if run.resilience.elastic else run.parallel.num_ranks
    each = run.parallel.pp * run.parallel.cp * run.parallel.tp
    for dp in range(min(run.parallel.dp, num_ranks // each), 0, -1):
        if dp * each < least:
            return None
        found = run if dp == run.parallel.dp else _with_dp(run, dp)
        if dp * each % multiple_of == 0 and not check(found):
            return found
    return None


def _with_dp(run: RunSpec, dp: int) -> RunSpec:
    parallel = run.parallel
    shard = parallel.dp_shard if dp % parallel.dp_shard == 0 else dp
    is_sharded = shard * parallel.cp > 1
    smaller = parallel.with_(
        dp_shard=shard, dp_replicate=dp // shard, zero=parallel.zero if is_sharded else 0
    )
    return _without_idle_settings(run.with_(parallel=smaller))


def _without_idle_settings(run: RunSpec) -> RunSpec:
    """The run with those settings at their default that have no effect on its mesh."""
    tree: dict[str, Any] = run.model_dump()
    for condition in CONDITIONS:
        *parents, name = condition.key.split(".")
        holder: Any = run
        values: Any = tree
        for parent in parents:
            holder = getattr(holder, parent, None)
            values = values.get(parent) if isinstance(values, dict) else None
        if isinstance(holder, Spec) and not condition.has_effect(run):
            values[name] = type(holder).model_fields[name].get_default()
    return RunSpec.model_validate(tree)


def overrides(run: RunSpec, changed: RunSpec) -> list[str]:
    """The settings of `changed` that differ, as overrides of `run` on the command line."""
    found = changed_settings(run.model_dump(mode="json"), changed)
    return [f"{change.key}={json.dumps(change.new)}" for change in found]


def mesh_text(parallel: ParallelSpec) -> str:
    """`3 ranks (dp_replicate=3)`: the ranks and the degrees above one."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    degrees = [f"{axis}={getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1]
    plural = "" if parallel.num_ranks == 1 else "s"
    return f"{parallel.num_ranks} rank{plural}" + (f" ({' '.join(degrees)})" if degrees else "")


@dataclass(frozen=True)
class _Device:
    """A device of this machine. Times are in seconds of one monotonic clock."""

    index: int
    failures_in_a_row: int = 0
    times_left_out: int = 0
    returns_at: float | None = None
    """When a device that was left out is used again; None for one in use."""


@dataclass(frozen=True)
class Devices:
    """The devices that ranks run on, spares last, and those that are left out for a while."""

    elastic: ElasticSpec
    _all: tuple[_Device, ...] = field(default=())

    @classmethod
    def of(cls, run: RunSpec, elastic: ElasticSpec) -> Self:
        """All devices of a run on one machine."""
        count = run.parallel.num_ranks + elastic.spare_ranks
        return cls(elastic, tuple(_Device(index) for index in range(count)))

    @property
    def available(self) -> tuple[int, ...]:
        """The devices that are not left out."""
        return tuple(one.index for one in self._all if one.returns_at is None)

    def after_failure(self, index: int, now: float, *, can_shrink: bool) -> Self:
        """The devices after a rank on one of them has failed; it is left out after several times in a row,
        unless too few would be left."""
        changed = [
            replace(one, failures_in_a_row=one.failures_in_a_row + 1 if one.index == index else 0)
            for one in self._all
        ]
        blamed = changed[index]
        if blamed.failures_in_a_row >= self.elastic.failures_per_device and can_shrink:
            changed[index] = replace(
                blamed,
                failures_in_a_row=self.elastic.failures_per_device - 1,  # one more after its return
                times_left_out=blamed.times_left_out + 1,
                returns_at=now + self.elastic.return_seconds * 2.0 ** min(20, blamed.times_left_out),
            )
        return replace(self, _all=tuple(changed))

    def returned(self, now: float) -> Self:
        """The devices with those in use again whose time has come."""
        changed = [
            replace(one, returns_at=None) if one.returns_at is not None and one.returns_at <= now else one
            for one in self._all
        ]
        return replace(self, _all=tuple(changed))
