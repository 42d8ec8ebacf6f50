"""A profile of a run as one JSON document: the figures of the busiest rank, a line for every rank, advice."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.hardware.catalogue import Cluster
from meshwright.observe.profile.changes import Change, Situation, best_changes
from meshwright.observe.profile.kernel_classes import TITLES
from meshwright.observe.profile.lanes import Span
from meshwright.observe.profile.matmuls import MatmulRow, Missed
from meshwright.observe.profile.pipeline_timeline import RankActions
from meshwright.observe.profile.rank_profile import RankProfile
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_seconds

PROFILE_FILE, PAGE_FILE = "profile.json", "profile.html"
MOST_MISSED = 8


@dataclass(frozen=True)
class RankResult:
    """What a rank sends to rank 0."""

    rank: int
    profile: RankProfile
    timed_seconds: float | None
    peak_bytes: int | None
    lanes: dict[str, list[Span]]
    actions: RankActions | None = None


@dataclass(frozen=True)
class ProfiledOn:
    """The device and how it was profiled."""

    device: str
    torch: str
    steps: str
    cluster: Cluster | None


def busiest(results: Sequence[RankResult]) -> RankResult:
    """The rank with most work in a step: the others wait for it."""
    return max(results, key=lambda one: one.profile.compute_seconds)


def profile_document(
    results: Sequence[RankResult], run: RunSpec, on: ProfiledOn, situation: Situation
) -> dict[str, Any]:
    """All figures of a profile in base units."""
    shown = busiest(results)
    profile, changes = shown.profile, best_changes(situation)
    return {
        "version": 1,
        "run": run.name,
        "fingerprint": run.fingerprint(),
        "device": on.device,
        "torch": on.torch,
        "num_ranks": len(results),
        "steps": on.steps,
        "rank": shown.rank,
        "is_cuda": profile.is_cuda,
        **_rates(shown, run, on.cluster),
        "verdict": verdict(shown, changes, results),
        "changes": [_change(one) for one in changes],
        "breakdown": profile.breakdown,
        "classes": [
            {**asdict(row), "title": TITLES[row.kind], "intensity": row.intensity} for row in profile.classes
        ],
        "tensor_core_share": profile.tensor_core_share if profile.is_cuda else None,
        "missed": [_missed(one) for one in profile.missed[:MOST_MISSED]],
        "matmuls": [_matmul(row) for row in profile.matmuls],
        "top": [asdict(row) for row in profile.top],
        "memory": profile.memory and asdict(profile.memory),
        "peak_bytes": shown.peak_bytes,
        "lanes": shown.lanes,
        "ranks": [_rank(one) for one in results],
    }


def _rates(shown: RankResult, run: RunSpec, cluster: Cluster | None) -> dict[str, Any]:
    """Seconds of a step without the profiler where they were timed, and what follows from them."""
    profile = shown.profile
    step = shown.timed_seconds or profile.profiled_seconds
    tokens = run.data.batch_tokens / step
    flops = tokens * flops_per_token(run.model, run.data.sequence_length) / run.parallel.num_ranks
    peaks = cluster.device.peak_flops_per_second if cluster is not None else {}
    peak = peaks.get("fp8" if run.precision.fp8 else run.precision.compute)
    return {
        "step_seconds": step,
        "is_timed": shown.timed_seconds is not None,
        "profiled_seconds": profile.profiled_seconds,
        "tokens_per_second": tokens,
        "flops_per_second_per_device": flops,
        "mfu": flops / peak if peak else None,
        "busy_seconds": profile.busy_seconds,
        "communication_seconds": profile.communication_seconds,
        "exposed_seconds": profile.exposed_seconds,
        "gap_seconds": profile.gap_seconds,
        "data_seconds": profile.data_seconds,
        "shares_of_seconds": profile.step_seconds,
    }


def _rank(one: RankResult) -> dict[str, Any]:
    profile = one.profile
    return {
        "rank": one.rank,
        "busy_seconds": profile.compute_seconds,
        "exposed_seconds": profile.exposed_seconds,
        "data_seconds": profile.data_seconds,
        "gap_seconds": profile.gap_seconds,
        "peak_bytes": one.peak_bytes or (profile.memory.peak_bytes if profile.memory else None),
    }


def _matmul(row: MatmulRow) -> dict[str, Any]:
    shape = row.shape
    return {
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "groups": shape.groups,
        "dtype": shape.dtype,
        "calls": row.calls,
        "seconds": row.seconds,
        "flops_per_second": row.flops_per_second,
        "on_tensor_cores": row.on_tensor_cores,
        "kernel": row.kernel,
    }


def _missed(one: Missed) -> dict[str, Any]:
    bounds = {"low_seconds": one.low_seconds, "high_seconds": one.high_seconds}
    return {**_matmul(one.row), "why": one.why, "gain_seconds": one.gain_seconds, **bounds}


def _change(one: Change) -> dict[str, Any]:
    return {**asdict(one), "overrides": one.overrides, "settings": dict(one.settings)}


def verdict(shown: RankResult, changes: Sequence[Change], results: Sequence[RankResult]) -> list[str]:
    """The profile in sentences, the most important first."""
    profile = shown.profile
    step = profile.step_seconds
    lines = [_first_line(shown)]
    if profile.is_cuda:
        lines.append(_tensor_core_line(profile))
    else:
        lines.append("A CPU has no tensor cores: the classes below are of operators, by their own time.")
    lines += [_missed_line(one, step) for one in profile.missed[:3] if one.gain_seconds >= 0.005 * step]
    waits = {
        "no kernel runs (launch gaps)"
        if profile.is_cuda
        else "no operator runs (Python)": profile.gap_seconds,
        "communication is exposed": profile.exposed_seconds,
        "the step waits for data": profile.data_seconds,
    }
    found = [f"{what} {seconds / step:.1%}" for what, seconds in waits.items() if seconds >= 0.005 * step]
    if found:
        lines.append(f"Of the step, {', '.join(found)}.")
    if profile.memory is not None:
        parts = sorted(profile.memory.peak_by_category.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
        lines.append(f"Memory peaks at {show_bytes(profile.memory.peak_bytes)}: {largest}.")
    lines += _rank_lines(results)
    if not changes:
        lines.append("No change of the run is expected to gain 1% or more.")
    return lines


def _first_line(shown: RankResult) -> str:
    profile, timed = shown.profile, shown.timed_seconds
    if timed is None:
        step = show_seconds(profile.profiled_seconds)
        return f"A step takes {step} under the profiler; none was timed without it."
    slower = profile.profiled_seconds / timed - 1.0
    return f"A step takes {show_seconds(timed)}; the profiler makes it {max(0.0, slower):.0%} longer."


def _tensor_core_line(profile: RankProfile) -> str:
    share = f"{profile.tensor_core_share:.0%} of the kernel time is on tensor cores"
    eligible = sum(row.seconds for row in profile.matmuls if row.is_eligible)
    missed = sum(one.row.seconds for one in profile.missed)
    if not profile.missed:
        return f"{share}; every eligible matmul is on them and aligned."
    return f"{share}; {missed / eligible:.0%} of the time of eligible matmuls misses their full rate."


def _missed_line(one: Missed, step: float) -> str:
    row, share = one.row, one.row.seconds / step
    gain = f"{one.low_seconds / step:.0%} to {one.high_seconds / step:.0%} of the step"
    return (
        f"The matmul {row.shape.text} (m x k x n) in {row.shape.dtype} takes {share:.1%} of the step "
        f"at {row.flops_per_second / 1e12:.0f} TFLOP/s: {one.why}. Aligned, it would save {gain}."
    )


def _rank_lines(results: Sequence[RankResult]) -> list[str]:
    """Who waits for whom, where ranks differ by a tenth or more."""
    if len(results) < 2:
        return []
    work = {one.rank: one.profile.compute_seconds for one in results}
    most, least = max(work, key=lambda rank: work[rank]), min(work, key=lambda rank: work[rank])
    if work[most] <= 1.1 * work[least]:
        return []
    pair = (
        f"rank {most} computes {show_seconds(work[most])} of a step, rank {least} {show_seconds(work[least])}"
    )
    return [f"{pair[0].upper()}{pair[1:]}: the others wait for it."]
