"""How often to save: the checkpoint interval that loses least to failures, and what it costs.

Young's and Daly's interval for a stall d per checkpoint and a mean time M between failures of all devices:

    interval = sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d        (d < 2M, else M)
    goodput  = interval / (M exp(R/M) (exp((interval + d) / M) - 1))        R: time of a restart

(Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.)

A short stall makes this interval so short that storage could not take the checkpoints. The planned interval
is therefore longer where that costs little goodput.
"""

import math
from dataclasses import dataclass

from meshwright.plan.explain.storage import checkpoint_bytes
from meshwright.plan.search.decision import Plan
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_count, show_number, show_seconds

DEVICE_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
"""For clusters without a rate of their own. Llama 3 405B: 419 unexpected interruptions of 16,384 H100 in 54
days (The Llama 3 Herd of Models, 2024)."""
RESTART_SECONDS = 120.0
"""Assumed time from a failure to the first step after it, compilation included."""
USUAL_SAVE_SECONDS = 600.0
"""Checkpoints are planned at least this far apart, while that costs no more than MAX_LOST_GOODPUT."""
MAX_LOST_GOODPUT = 0.005


@dataclass(frozen=True)
class SaveInterval:
    """The best interval between checkpoints, and what is expected with it."""

    seconds: float
    """Training time between two checkpoints."""
    failure_seconds: float
    """Mean time between failures of all devices."""
    stall_seconds: float
    """How long training stands still for a checkpoint."""
    goodput: float
    """Expected time of useful steps / wall time, as far as failures and checkpoints go."""


def save_interval(
    *, failure_seconds: float, stall_seconds: float, restart_seconds: float = RESTART_SECONDS
) -> SaveInterval:
    """Daly's interval for a cluster that fails every `failure_seconds` on average."""
    mean, stall = failure_seconds, stall_seconds
    ratio = stall / (2.0 * mean)
    seconds = mean
    if ratio < 1.0:
        series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
        seconds = math.sqrt(2.0 * stall * mean) * series - stall
    return _with_goodput(seconds, mean, stall, restart_seconds)


def _with_goodput(seconds: float, mean: float, stall: float, restart_seconds: float) -> SaveInterval:
    cost = mean * math.exp(restart_seconds / mean) * math.expm1((seconds + stall) / mean)
    return SaveInterval(seconds, mean, stall, seconds / cost)


def usual_interval(best: SaveInterval, *, write_seconds: float = 0.0) -> SaveInterval:
    """The interval to plan: the best one, or a longer one that storage can take and that costs little.

    No interval is shorter than a checkpoint takes to write.
    """
    seconds = max(best.seconds, write_seconds, USUAL_SAVE_SECONDS)
    while True:
        found = _with_goodput(seconds, best.failure_seconds, best.stall_seconds, RESTART_SECONDS)
        shortest = max(best.seconds, write_seconds)
        if seconds <= shortest or best.goodput - found.goodput <= MAX_LOST_GOODPUT:
            return found
        seconds = max(shortest, 0.95 * seconds)


def with_checkpoints(plan: Plan) -> RunSpec:
    """The run of a plan, saved as often as planned, unless the user has decided how often or saves once."""
    run = plan.best.run
    steps = _num_steps(plan, _planned(plan)[1])
    if run.checkpoint.every_steps is not None or steps >= run.schedule.num_steps:
        return run
    if _decides_saves(plan):
        return run
    saved = run.with_(checkpoint=run.checkpoint.with_(every_steps=steps))
    return run if check(saved) else saved


def _decides_saves(plan: Plan) -> bool:
    return any(text.startswith("checkpoint.every_steps=") for text in plan.question.pins.overrides)


def _planned(plan: Plan) -> tuple[SaveInterval, SaveInterval]:
    """The interval that loses least, and the planned one."""
    cluster, size = plan.question.cluster, checkpoint_bytes(plan.question)
    best = save_interval(
        failure_seconds=3600.0 * _device_hours(plan) / cluster.num_devices,
        stall_seconds=size / cluster.num_devices / cluster.host.bytes_per_second,
    )
    rate = cluster.storage_bytes_per_second
    return best, usual_interval(best, write_seconds=0.0 if rate is None else size / rate)


def _device_hours(plan: Plan) -> float:
    return plan.question.cluster.device_hours_per_failure or DEVICE_HOURS_PER_FAILURE


def _num_steps(plan: Plan, interval: SaveInterval) -> int:
    return max(1, round(interval.seconds / plan.best.step_seconds))


def failure_sentences(plan: Plan) -> list[str]:
    """How often to save, the expected goodput, and the disk and bandwidth that it needs."""
    cluster, size = plan.question.cluster, checkpoint_bytes(plan.question)
    best, found = _planned(plan)
    source = "by the catalogue" if cluster.device_hours_per_failure else "as published for 16,384 H100"
    rate = f"one per {show_count(_device_hours(plan))} device-hours, {source}"
    devices = show_number(cluster.num_devices, "device")
    return [
        f"Failures: checkpoint.every_steps={_num_steps(plan, found)} ({show_seconds(found.seconds)}) "
        f"{_compared(best, found, size)}, with one failure per {show_seconds(found.failure_seconds)} of "
        f"{devices} ({rate}) and {show_seconds(found.stall_seconds)} of stall per checkpoint. The expected "
        f"goodput is {found.goodput:.1%}, with restarts of {show_seconds(RESTART_SECONDS)}. A checkpoint "
        f"takes {show_bytes(size)} of disk; writing it within the interval needs "
        f"{show_bytes(size / found.seconds)}/s."
    ]


def _compared(best: SaveInterval, planned: SaveInterval, size: float) -> str:
    if planned.seconds <= best.seconds:
        return "loses least"
    return (
        f"loses {best.goodput - planned.goodput:.1%} more than the best interval, "
        f"{show_seconds(best.seconds)}, which would write {show_bytes(size / best.seconds)}/s"
    )
