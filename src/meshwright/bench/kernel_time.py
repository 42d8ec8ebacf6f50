"""Time of a step on a GPU by class of kernel, and the gaps in which no kernel runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.observe.profile.kernel_classes import ATTENTION, class_of

# Annotated ranges, which the profiler lists among the device's events; they are not kernels.
_RANGES = ("Optimizer.", "ProfilerStep", "## Call", "Torch-Compiled")
GAPS = "gaps"


@dataclass(frozen=True)
class KernelBudget:
    """Seconds of one step by class of kernel; `gaps` is the time in which no kernel runs."""

    step_seconds: float
    seconds_by_class: dict[str, float]
    largest: list[tuple[str, float, int]] = field(default_factory=list)
    """(kernel, seconds per step, calls per step), the most expensive first."""
    attention_kernels: list[str] = field(default_factory=list)


def budget_of(kernels: Iterable[tuple[str, float, float]], *, num_steps: int) -> KernelBudget:
    """The budget of kernels given as (name, start, end) in seconds; overlapping kernels count in full."""
    by_class: dict[str, float] = {}
    by_name: dict[str, list[float]] = {}
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    busy, last_end = 0.0, ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        by_class[class_of(name)] = by_class.get(class_of(name), 0.0) + (end - start) / num_steps
        by_name.setdefault(name, []).append(end - start)
        busy += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    total = last_end - ordered[0][1] if ordered else 0.0
    by_class[GAPS] = (total - busy) / num_steps
    costs = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return KernelBudget(
        step_seconds=total / num_steps,
        seconds_by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
        largest=[(name, sum(times) / num_steps, len(times) // num_steps) for name, times in costs[:25]],
        attention_kernels=[name for name, _ in costs if class_of(name) == ATTENTION],
    )


def kernel_recorder() -> profile:
    """torch's profiler for kernels only. It accumulates events, since torch warns when it drops them."""
    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def profiled(steps: Callable[[], Any], *, num_steps: int) -> KernelBudget:
    """The kernel budget of `steps`, a call that makes `num_steps` steps; CUDA only."""
    torch.cuda.synchronize()
    with kernel_recorder() as recorded:
        steps()
        torch.cuda.synchronize()
    return budget_of(kernels_of(recorded), num_steps=num_steps)


def kernels_of(recorded: profile) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds of every kernel and copy on the device."""
    found = []
    for event in recorded.events() or ():
        is_range = getattr(event, "is_user_annotation", False) or event.name.startswith(_RANGES)
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_range:
            found.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return found


def show_budget(budget: KernelBudget, *, num_largest: int = 15) -> str:
    """The budget as a table: milliseconds and share of the step by class, and the most expensive kernels."""
    total = budget.step_seconds or 1.0
    lines = [f"{'class':<14} {'ms':>9} {'share':>7}"]
    lines += [
        f"{name:<14} {seconds * 1e3:>9.2f} {seconds / total:>7.1%}"
        for name, seconds in budget.seconds_by_class.items()
    ]
    lines += [f"{'step':<14} {budget.step_seconds * 1e3:>9.2f}", "", f"{'ms':>9} {'calls':>6}  kernel"]
    lines += [
        f"{seconds * 1e3:>9.2f} {calls:>6}  {name[:110]}"
        for name, seconds, calls in budget.largest[:num_largest]
    ]
    return "\n".join(lines)
