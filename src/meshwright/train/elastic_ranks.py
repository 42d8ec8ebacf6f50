"""The ranks that the next start of a run has on this machine. Imports no torch."""

import time
from collections.abc import Callable, Sequence

from meshwright.launch.attempt import AttemptEnd, Interruption
from meshwright.launch.launched_node import LaunchedNode
from meshwright.resilience.elastic import Devices, mesh_text, overrides, run_on
from meshwright.spec import RunSpec


class ElasticRanks:
    """The run with the mesh for the devices of this machine that work; without `resilience.elastic` as is."""

    def __init__(
        self,
        run: RunSpec,
        node: LaunchedNode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`node` is set where a platform has started a fixed number of nodes."""
        self.node = node
        self._asked, self._full, self._clock = run, run, clock
        self.run = run
        """The run that the next start has: its mesh fits the devices that are in use."""
        elastic = run.resilience.elastic
        self._devices = Devices.of(run, elastic) if elastic else None

    def begin(self) -> int | None:
        """Called before each start; None: it may begin."""
        return None

    def end(self, code: int) -> None:
        """The run ends."""

    @property
    def overrides(self) -> list[str]:
        """What differs from the run that was asked for, as overrides on the command line."""
        return overrides(self._asked, self.run)

    @property
    def devices(self) -> Sequence[int] | None:
        """The devices of the next start; None where all are used, in their order."""
        return self._devices.available[: self.run.parallel.num_ranks] if self._devices else None

    def shrink_microbatch(self, smaller: RunSpec) -> None:
        """From now on use the micro-batch of `smaller`, which is `self.run` after an OOM."""
        changes = {"data": smaller.data, "memory": smaller.memory}
        self._full, self.run = self._full.with_(**changes), self.run.with_(**changes)

    def change(self) -> Interruption | None:
        """A reason to restart with more ranks, once devices that were left out may be used again."""
        returned = self._devices.returned(self._clock()) if self._devices else None
        if returned is None or returned == self._devices:
            return None
        larger = run_on(self._full, len(returned.available))
        if larger is None or larger.parallel.num_ranks <= self.run.parallel.num_ranks:
            return None
        text = f"devices are used again: going on with {mesh_text(larger.parallel)}"
        return Interruption("resized", text, saves=True)

    def after(self, ended: AttemptEnd) -> str:
        """Choose devices and mesh of the next start; returns what has changed, or an empty text."""
        if self._devices is None:
            return ""
        before, used = self.run, self.devices or ()
        is_blamed = ended.failed_rank is not None and ended.cause in ("killed", "hang", "error")
        now = self._clock()
        self._devices = self._devices.returned(now)
        if is_blamed and ended.failed_rank is not None:
            can_shrink = run_on(self._full, len(self._devices.available) - 1) is not None
            self._devices = self._devices.after_failure(used[ended.failed_rank], now, can_shrink=can_shrink)
        self.run = run_on(self._full, len(self._devices.available)) or self._full
        if (self.devices, self.run.parallel) == (used, before.parallel):
            return ""
        left = sorted(set(used) - set(self.devices or ()))
        out = f"device {', '.join(map(str, left))} is left out; " if left else ""
        return f"{out}{mesh_text(before.parallel)} -> {mesh_text(self.run.parallel)}"
