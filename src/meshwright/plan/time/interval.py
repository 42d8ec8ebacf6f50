"""How far a predicted step time may be off, by the kind of run.

Our own runtime was measured on one device, with dense models. For every other kind the interval comes from
published runs of other frameworks: nine of ten of them are inside when their source is left out of the fit
(bench/calibrate.py). Kinds, the first that applies:

    moe                  routed experts
    blackwell            devices with fp4 tensor cores
    fp8                  linears in fp8
    dense_one_node       everything else on one node
    dense_several_nodes  and on several
"""

import numpy as np

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import Workload

KINDS = {
    "dense_one_node": "dense, one node",
    "dense_several_nodes": "dense, several nodes",
    "fp8": "dense, fp8",
    "blackwell": "dense, Blackwell",
    "moe": "MoE",
}


def kind_of(workload: Workload, cluster: Cluster) -> str:
    """The kind of a run, a key of KINDS."""
    if workload.model.moe is not None:
        return "moe"
    if "fp4" in cluster.device.peak_flops_per_second:
        return "blackwell"
    if workload.is_low_precision:
        return "fp8"
    return "dense_one_node" if cluster.num_nodes == 1 else "dense_several_nodes"


def half_width(workload: Workload, at: Layouts, cluster: Cluster, framework: Framework) -> Floats:
    """Relative half-width of the 90% interval of every layout."""
    interval, kind = framework.interval, kind_of(workload, cluster)
    published = np.full(len(at), getattr(interval, kind))
    if interval.measured is None or not _was_measured(workload, kind):
        return published
    return np.where(at.num_ranks == 1, interval.measured, published)


def _was_measured(workload: Workload, kind: str) -> bool:
    """Whether steps of this kind were measured on one device; none with adapters was."""
    return kind in ("dense_one_node", "fp8") and workload.adapters is None


def interval_source(workload: Workload, cluster: Cluster, num_ranks: int) -> str:
    """Where the interval of our own runtime comes from, as a sentence."""
    kind = kind_of(workload, cluster)
    if num_ranks == 1 and _was_measured(workload, kind):
        return "nine of ten steps measured on one H200 are inside"
    return f"nine of ten published runs of other frameworks ({KINDS[kind]}) are inside; ours was not measured"
