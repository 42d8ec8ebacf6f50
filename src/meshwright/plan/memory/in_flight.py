"""Micro-batches in flight on the ranks of a pipeline, by the schedule's own order."""

from functools import cache

import numpy as np

from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import (
    SCHEDULES,
    SPLIT_BACKWARD,
    PipelineShape,
    actions,
    peak_in_flight,
    problem,
)
from meshwright.spec.parallel import Schedule


def in_flight(at: Layouts) -> Floats:
    """Micro-batches whose activations a rank holds at its peak, per stage; units of the rank's layers."""
    micro, pp, virtual = at.num_microbatches, at.pp, at.virtual_stages
    ranks = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1], axis=1)
    one_f_one_b = np.minimum(micro[:, None], pp[:, None] - ranks)
    per_round = micro // np.maximum(micro // pp, 1)
    chunks = np.minimum(
        (micro * virtual)[:, None], ((virtual - 1) * per_round)[:, None] + 2 * (pp[:, None] - ranks - 1) + 1
    )
    interleaved = chunks / virtual[:, None]
    name = np.asarray(SCHEDULES)[at.schedule][:, None]
    held = np.where(np.isin(name, ["gpipe", "looped_bfs"]), micro[:, None] + 0 * ranks, one_f_one_b)
    held = np.where(name == "interleaved_1f1b", interleaved, held).astype(np.float64)
    for row in np.flatnonzero(np.isin(name[:, 0], sorted(SPLIT_BACKWARD)) & (pp > 1)):
        held[row] = _simulated_in_flight(
            SCHEDULES[int(at.schedule[row])], int(pp[row]), int(virtual[row]), int(micro[row])
        )
    return np.where((pp == 1)[:, None], 1.0, held.astype(np.float64))


@cache
def _simulated_in_flight(schedule: Schedule, pp: int, virtual: int, micro: int) -> tuple[float, ...]:
    """Micro-batches in flight on the first, the second and the last rank, counted in the schedule's order.

    From some micro-batch on the order repeats itself, so a long one is counted on a shorter one.
    """
    most = 4 * pp * virtual
    if micro > most:
        micro = most + micro % pp
    shape = PipelineShape(pp, virtual, micro)
    if problem(schedule, shape) is not None:
        return (float(min(micro, pp)),) * 3
    orders = actions(schedule, shape)
    return tuple(peak_in_flight(orders[rank]) / virtual for rank in (0, min(1, pp - 1), pp - 1))
