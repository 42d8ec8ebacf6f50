"""How many devices finish this many tokens by a deadline, and how step time scales with devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.search.choose_precision import corner_questions
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.question import Question
from meshwright.plan.search.search import lower_bound_seconds, search
from meshwright.units import show_seconds

MAX_DEVICES = 2**16


@dataclass(frozen=True)
class ScalingPoint:
    """The best step time on one number of devices."""

    num_devices: int
    step_seconds: float
    tokens_per_second: float


def seconds_allowed(question: Question, *, tokens: int, deadline_seconds: float) -> float:
    """Seconds that a step may take so that all tokens are trained by the deadline."""
    return deadline_seconds * question.run.data.batch_tokens / tokens


def size_for_deadline(
    question: Question, *, tokens: int, deadline_seconds: float, open_ended: bool
) -> Question:
    """The same question on the smallest cluster whose best plan meets the deadline.

    `open_ended`: the user named a device without a number; otherwise the cluster is the limit.
    """
    allowed = seconds_allowed(question, tokens=tokens, deadline_seconds=deadline_seconds)
    limit = MAX_DEVICES if open_ended else question.cluster.num_devices
    enough, fastest = _first_fast_enough(question, allowed, limit)
    if enough is None:
        raise _too_late(question, tokens, deadline_seconds, fastest, limit)
    return on_devices(question, _smallest(question, allowed, enough))


def on_devices(question: Question, num_devices: int) -> Question:
    """The question on another number of devices of the same cluster."""
    return replace(question, cluster=_resized(question.cluster, num_devices))


def _resized(cluster: Cluster, num_devices: int) -> Cluster:
    per_node = cluster.devices_per_node
    if num_devices <= per_node or num_devices % per_node == 0:
        return cluster.with_devices(num_devices)
    return cluster.with_devices(-(-num_devices // per_node) * per_node)


def best_seconds(question: Question, num_devices: int) -> float:
    """The fastest step that uses exactly this many devices; infinite when nothing fits."""
    sized = replace(on_devices(question, num_devices), objective="speed")
    ranks = range(num_devices, num_devices + 1)
    found = [search(each, ranks=ranks).fitting.step_seconds for each in corner_questions(sized)]
    return min((float(seconds.min()) for seconds in found if len(seconds)), default=float("inf"))


def _first_fast_enough(question: Question, allowed: float, limit: int) -> tuple[int | None, float]:
    """The first power of two of devices that is fast enough, or None, and the fastest step found."""
    fastest, count = float("inf"), 1
    while True:
        count = min(count, limit)
        if lower_bound_seconds(question, count) <= allowed or count == limit:
            fastest = min(fastest, best_seconds(question, count))
        if fastest <= allowed:
            return count, fastest
        if count == limit:
            return None, fastest
        count *= 2


def _smallest(question: Question, allowed: float, enough: int) -> int:
    """The smallest number of devices up to `enough` on which some layout is fast enough."""
    sized = on_devices(question, enough)
    ranks = range(enough // 2 + 1, enough + 1)
    found = [search(each, ranks=ranks, within_seconds=allowed).fitting for each in corner_questions(sized)]
    return min(int(each.layouts.num_ranks.min()) for each in found if len(each))


def _too_late(question: Question, tokens: int, deadline: float, fastest: float, limit: int) -> PlanError:
    batch = question.run.data.batch_tokens
    if not np.isfinite(fastest):
        fact = f"{question.run.model.family} does not fit on {limit} x {question.cluster.device.title}"
        return PlanError(fact, where="--on", hint="`meshwright plan` without --deadline says what would fit")
    soonest = show_seconds(fastest * tokens / batch)
    on = f"{limit} x {question.cluster.device.title}"
    fact = f"training takes at best {soonest} on {on}; the deadline is {show_seconds(deadline)}"
    need = fastest * tokens / batch / deadline
    hint = f"a deadline {need:.2g} times as long, fewer tokens, a larger --batch-tokens, or more devices"
    return PlanError(fact, where="--deadline", hint=hint)


def strong_scaling(plan: Plan, counts: Sequence[int]) -> list[ScalingPoint]:
    """The best step at the same global batch on each number of devices on which a layout fits."""
    points: list[ScalingPoint] = []
    for count in counts:
        seconds = best_seconds(plan.question, count)
        if np.isfinite(seconds):
            points.append(ScalingPoint(count, seconds, plan.question.run.data.batch_tokens / seconds))
    return points


def weak_scaling(plan: Plan, counts: Sequence[int]) -> list[ScalingPoint]:
    """The best step with as many sequences per device as the plan has, on each number of devices."""
    data, used = plan.question.run.data, plan.best.num_ranks
    points: list[ScalingPoint] = []
    for count in counts:
        sequences = data.batch_sequences * count // used
        if sequences < 1:
            continue
        run = plan.question.run.with_(data=data.with_(batch_sequences=sequences))
        seconds = best_seconds(replace(plan.question, run=run), count)
        if np.isfinite(seconds):
            points.append(ScalingPoint(count, seconds, sequences * data.sequence_length / seconds))
    return points


def scaling_counts(plan: Plan, *, max_counts: int = 7) -> list[int]:
    """Device counts around the plan's: halves below it, doubles above."""
    used, per_node = plan.best.num_ranks, plan.question.cluster.devices_per_node
    below = [used // 2**k for k in range(4) if used % 2**k == 0]
    counts = {*below, used * 2, used * 4}
    full_nodes = [count for count in counts if count <= per_node or count % per_node == 0]
    return sorted(full_nodes)[-max_counts:]
