"""How many devices finish this many tokens by a deadline, and how step time scales with devices."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.search.choose_precision import choose_precision, corner_questions
from meshwright.plan.search.decision import Plan, choose
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
    """The same question on the smallest cluster whose plan meets the deadline.

    `open_ended`: the user named a device without a number; otherwise the cluster is the limit.
    """
    allowed = seconds_allowed(question, tokens=tokens, deadline_seconds=deadline_seconds)
    limit = MAX_DEVICES if open_ended else question.cluster.num_devices
    enough = _smallest(question, allowed, limit)
    if enough is None:
        fastest = planned_step(on_devices(question, limit))[0]
        raise _too_late(question, tokens, deadline_seconds, fastest, limit)
    return on_devices(question, enough)


def planned_step(question: Question) -> tuple[float, int]:
    """Step time and devices in use of the plan that this question gets; infinite when nothing fits."""
    chosen = choose_precision(question)
    if len(chosen.result.fitting) == 0:
        return float("inf"), question.cluster.num_devices
    best = choose(chosen, top=1, search_seconds=0.0).best
    return best.step_seconds, best.num_ranks


def _smallest(question: Question, allowed: float, limit: int) -> int | None:
    """The smallest number of devices whose plan is fast enough: more devices are never slower."""
    counts = _counts(question.cluster, limit)
    # No plan on this many devices is fast enough: even every FLOP at the best rate takes longer.
    too_few = sum(lower_bound_seconds(question, count) > allowed for count in counts) - 1
    enough, guess = len(counts), min(too_few + 1, len(counts) - 1)
    while enough - too_few > 1:
        seconds, used = planned_step(on_devices(question, counts[guess]))
        if seconds <= allowed:
            # Where devices stay idle, as many as are in use are asked next: their own plan may be another.
            enough, in_use = guess, bisect_left(counts, used)
            guess = in_use if too_few < in_use < enough else (too_few + enough) // 2
            continue
        too_few = guess
        # Half as many again until it is enough, then halves of what is left.
        more = max(bisect_left(counts, 1.5 * counts[guess]), too_few + 1)
        guess = min(more, enough - 1) if enough == len(counts) else (too_few + enough) // 2
    return counts[enough] if enough < len(counts) else None


def _counts(cluster: Cluster, limit: int) -> list[int]:
    """Numbers of devices to choose from: up to one node any, then full nodes."""
    per_node = cluster.devices_per_node
    return [*range(1, min(per_node, limit) + 1), *range(2 * per_node, limit + 1, per_node)]


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
