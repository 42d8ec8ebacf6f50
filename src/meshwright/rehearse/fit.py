"""Whether the traced ranks fit a device, and what to change where they do not."""

from collections.abc import Sequence

import numpy as np

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.layouts import one_layout
from meshwright.plan.memory import FIT_SHARE, outside_bytes
from meshwright.plan.predict import recompute_that_fits
from meshwright.rehearse.rank import RankReport
from meshwright.spec import RunSpec
from meshwright.units import show_bytes


def outside_of(run: RunSpec) -> float:
    """Bytes of the device that torch does not see: the context and the communicators."""
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return float(sum(np.max(values) for values in outside_bytes(at).values()))


def require_fit(run: RunSpec, reports: Sequence[RankReport], cluster: Cluster) -> None:
    """PlanError when the fullest rank does not fit; the hint says what would."""
    fullest = max(reports, key=lambda report: report.reserved_bytes)
    needed = fullest.reserved_bytes + outside_of(run)
    usable = FIT_SHARE * cluster.device.memory_bytes
    if needed <= usable:
        return
    largest = max(fullest.items, key=lambda name: fullest.items[name])
    raise PlanError(
        f"rank {fullest.rank} needs {show_bytes(needed)}, {cluster.device.title} has {show_bytes(usable)} "
        f"to give; most of it is {largest}, {show_bytes(fullest.items[largest])}",
        where=fullest.moment,
        hint=_ways(run, cluster, needed - usable),
    )


def _ways(run: RunSpec, cluster: Cluster, missing: float) -> str:
    ways = []
    least = recompute_that_fits(run, cluster) if run.parallel.num_ranks == cluster.num_devices else None
    if least is not None and least != run.memory.recompute:
        ways.append(f"memory.recompute={least}")
    if run.data.microbatch_sequences > 1:
        ways.append(f"data.microbatch_sequences={run.data.microbatch_sequences // 2}")
    if run.parallel.dp_shard * run.parallel.cp > 1 and run.parallel.zero < 3:
        ways.append(f"parallel.zero={run.parallel.zero + 1}")
    ways.append("more devices along dp_shard, tp or pp: `meshwright plan` finds a layout")
    return f"{show_bytes(missing)} too many; any of: " + "; ".join(ways)
