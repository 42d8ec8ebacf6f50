"""Whether the rehearsed ranks fit a device, and what to change where they do not."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.explain.fixes import run_fixes
from meshwright.plan.memory.rank_bytes import FIT_SHARE, outside_bytes
from meshwright.plan.predict import predict_run
from meshwright.plan.workload.layouts import one_layout
from meshwright.rehearse.rank_report import RankReport
from meshwright.spec import RunSpec
from meshwright.units import show_bytes


def outside_of(run: RunSpec) -> float:
    """Device bytes outside of torch's allocator: CUDA's context and NCCL's communicators."""
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return float(sum(np.max(values) for values in outside_bytes(at).values()))


def require_fit(run: RunSpec, reports: Sequence[RankReport], cluster: Cluster) -> None:
    """PlanError when the rank with the most reserved bytes does not fit; the hint lists what would fit."""
    highest = max(reports, key=lambda report: report.reserved_bytes)
    needed = highest.reserved_bytes + outside_of(run)
    usable = FIT_SHARE * cluster.device.memory_bytes
    if needed <= usable:
        return
    largest = max(highest.items, key=lambda name: highest.items[name])
    raise PlanError(
        f"rank {highest.rank} needs {show_bytes(needed)}, {cluster.device.title} has {show_bytes(usable)} "
        f"usable; the largest item is {largest}, {show_bytes(highest.items[largest])}",
        where=highest.peak_phase,
        hint=_ways(run, cluster, needed - usable),
    )


def _ways(run: RunSpec, cluster: Cluster, missing: float) -> str:
    """Changes that are predicted to save what is missing on the same devices; last, more devices."""
    ways = ["more devices along dp_shard, tp or pp: `meshwright plan` finds a layout"]
    if run.parallel.num_ranks == cluster.num_devices:
        spared = int(predict_run(run, cluster).peak_stage.device_bytes - missing)
        device = replace(cluster.device, memory_bytes=max(1, int(spared / FIT_SHARE)))
        ways = [fix.text for fix in run_fixes(run, replace(cluster, device=device))] + ways
    listed = "".join(f"\n         - {way}" for way in ways)
    return f"{show_bytes(missing)} too many; any of:{listed}"
