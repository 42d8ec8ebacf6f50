"""How often to save: the checkpoint interval that loses least to failures, and what it costs.

Young's and Daly's interval for a stall d per checkpoint and a mean time M between failures of all devices:

    interval = sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d        (d < 2M, else M)
    goodput  = interval / (M exp(R/M) (exp((interval + d) / M) - 1))        R: time of a restart

(Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.)
"""

import math
from dataclasses import dataclass

from meshwright.plan.explain.storage import checkpoint_bytes
from meshwright.plan.search.decision import Plan
from meshwright.units import show_bytes, show_count, show_seconds

DEVICE_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
"""For clusters without a rate of their own. Llama 3 405B: 419 unexpected interruptions of 16,384 H100 in 54
days (The Llama 3 Herd of Models, 2024)."""
RESTART_SECONDS = 120.0
"""Assumed time from a failure to the first step after it, compilation included."""


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
    cost = mean * math.exp(restart_seconds / mean) * math.expm1((seconds + stall) / mean)
    return SaveInterval(seconds, mean, stall, seconds / cost)


def failure_sentences(plan: Plan) -> list[str]:
    """How often to save, the expected goodput, and the disk and bandwidth that it needs."""
    cluster, size = plan.question.cluster, checkpoint_bytes(plan.question)
    device_hours = cluster.device_hours_per_failure or DEVICE_HOURS_PER_FAILURE
    found = save_interval(
        failure_seconds=3600.0 * device_hours / cluster.num_devices,
        stall_seconds=size / cluster.num_devices / cluster.host.bytes_per_second,
    )
    steps = max(1, round(found.seconds / plan.best.step_seconds))
    source = "by the catalogue" if cluster.device_hours_per_failure else "as published for 16,384 H100"
    rate = f"one per {show_count(device_hours)} device-hours, {source}"
    return [
        f"Failures: checkpoint.every_steps={steps} ({show_seconds(found.seconds)}) loses least, with one "
        f"failure per {show_seconds(found.failure_seconds)} of {cluster.num_devices} devices ({rate}) and "
        f"{show_seconds(found.stall_seconds)} of stall per checkpoint. The expected goodput is "
        f"{found.goodput:.1%}, with restarts of {show_seconds(RESTART_SECONDS)}. A checkpoint takes "
        f"{show_bytes(size)} of disk; writing it within the interval needs "
        f"{show_bytes(size / found.seconds)}/s."
    ]
