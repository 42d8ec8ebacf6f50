"""Why this layout, in the words of the ladder: one device, data parallel, ZeRO, tensor, pipeline, more.

Every sentence rests on a number that was priced: what the rung below would need or take.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.plan.search.allow import default_of
from meshwright.plan.search.decision import Candidate, Plan
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import Question, price_memory
from meshwright.plan.search.search import TIE_FRACTION, search
from meshwright.plan.search.space import least_memory, meshes
from meshwright.plan.workload.layouts import FULL, Layouts, layouts
from meshwright.units import show_bytes, show_count, show_seconds

STATE_ITEMS = ("weights", "gradients", "master", "optimizer")
SHARED_BY_ZERO = {
    1: "optimizer states are",
    2: "optimizer states and gradients are",
    3: "optimizer states, gradients and weights are",
}


def explain(plan: Plan) -> list[str]:
    """The reasons, from the bottom of the ladder up."""
    best = plan.best
    return [
        *_state(best),
        *_data_parallel(plan),
        *_technique(plan, "tp", _tp_words(best)),
        *_technique(plan, "pp", _pp_words(best)),
        *_technique(plan, "cp", _cp_words(best)),
        *_technique(plan, "ep", _ep_words(best)),
        *_recompute(plan),
        *_offload(plan),
        *_formats(plan),
        *_idle(plan),
    ]


def state_bytes(candidate: Candidate) -> float:
    """Weights, gradients and optimizer states of the fullest rank."""
    items = candidate.memory_items[candidate.peak_stage]
    return sum(items.get(name, 0.0) for name in STATE_ITEMS)


def full_state_bytes(question: Question) -> float:
    """The same for the whole model on one device."""
    found = price_memory(question, layouts(num_microbatches=2))
    return float(sum(found.items[name][0, 0] for name in STATE_ITEMS if name in found.items))


def _state(best: Candidate) -> Iterator[str]:
    question = best.question
    whole, room = full_state_bytes(question), question.cluster.device.memory_bytes
    each = whole / question.work.counts.total
    family, total = question.run.model.family, show_count(question.work.counts.total)
    state = f"{family} has {total} parameters; their whole state ({each:.0f} B each) is {show_bytes(whole)}"
    device = f"{question.cluster.device.title}, {show_bytes(room)}"
    if best.num_ranks == 1:
        need = f"with activations {show_bytes(best.device_bytes)}"
        moved = "with host memory " if best.run.memory.offload else ""
        yield f"{state}, and {moved}{need}: it fits on one device ({device})."
    else:
        fits = "fits on" if whole < room else "does not fit on"
        yield f"{state}, which {fits} one device ({device})."


def _data_parallel(plan: Plan) -> Iterator[str]:
    best, at = plan.best, plan.best.at
    dp, zero = int(at.dp[0]), int(at.zero[0])
    if best.num_ranks == 1 or dp * int(at.cp[0]) == 1:
        return
    if zero == 0:
        yield from _ddp_words(best, dp)
        return
    shards = int(at.shards[0])
    across = f" in {int(at.dp_replicate[0])} replicas" if int(at.dp_replicate[0]) > 1 else ""
    yield (
        f"ZeRO-{zero}: {SHARED_BY_ZERO[zero]} shared over {shards} ranks{across}, "
        f"which leaves {show_bytes(state_bytes(best))} of state per rank. {_lower_zero(plan, zero)}"
    )


def _ddp_words(best: Candidate, dp: int) -> Iterator[str]:
    shared = Candidate(best.question, _shared(best.at))
    saved = show_bytes(best.device_bytes - shared.device_bytes)
    alone = int(best.at.tp[0]) * int(best.at.pp[0]) * int(best.at.cp[0]) == 1
    what = "The whole state fits on one GPU" if alone else "The state of each cut fits on its GPU"
    margin = "" if shared.step_seconds >= best.step_seconds else f" (to within {TIE_FRACTION:.0%})"
    yield f"{what}: DDP over {dp} ranks is fastest{margin}; ZeRO-1 would save {saved} you do not need."


def _shared(at: Layouts) -> Layouts:
    return replace(at, zero=at.zero * 0 + 1, dp_shard=at.dp_replicate, dp_replicate=at.dp_shard)


def _lower_zero(plan: Plan, zero: int) -> str:
    """What one ZeRO stage less would mean for this very layout."""
    at = plan.best.at
    lower = replace(at, zero=at.zero - 1)
    if zero == 1:
        lower = replace(lower, dp_shard=at.dp_shard * 0 + 1, dp_replicate=at.dp)
    candidate = Candidate(plan.question, lower)
    name = f"ZeRO-{zero - 1}" if zero > 1 else "DDP"
    need = f"{show_bytes(candidate.device_bytes)}"
    if not candidate.fits:
        return f"{name} would need {need} per rank and does not fit."
    slower = candidate.step_seconds / plan.best.step_seconds - 1.0
    return (
        f"{name} would fit ({need}) but is {slower:.1%} slower."
        if slower > 0
        else f"{name} would need {need}."
    )


@dataclass(frozen=True)
class _Without:
    """The best that can be done when one axis may not be cut."""

    step_seconds: float | None
    least_bytes: float


def _without(plan: Plan, axis: str) -> _Without:
    priced = plan.found.fitting
    whole = getattr(priced.layouts, axis) == 1
    if whole.any():
        return _Without(float(priced.step_seconds[whole].min()), 0.0)
    allowed = {**plan.question.pins.allowed, axis: (1,)}
    pins = Pins(allowed, plan.question.pins.said, plan.question.pins.overrides)
    question = replace(plan.question, pins=pins)
    found = search(question)
    if len(found.fitting):
        return _Without(float(found.fitting.step_seconds.min()), 0.0)
    return _Without(None, least_bytes(question))


def least_bytes(question: Question) -> float:
    """What the least_memory layout of a question reserves, with host memory; infinite when it has none."""
    question = replace(question, offloads=question.may_offload)
    table = meshes(question.space, range(1, question.cluster.num_devices + 1))
    if len(table["tp"]) == 0:
        return float("inf")
    return float(price_memory(question, least_memory(question.space, table)).peak_device_bytes.min())


def _technique(plan: Plan, axis: str, words: str) -> Iterator[str]:
    if int(getattr(plan.best.at, axis)[0]) == 1:
        return
    if axis in plan.question.pins.allowed:
        yield f"{words} It is pinned."
        return
    other = _without(plan, axis)
    if other.step_seconds is None:
        needs = (
            f"at least {show_bytes(other.least_bytes)} per device"
            if np.isfinite(other.least_bytes)
            else "more"
        )
        yield f"{words} Without it nothing fits: {needs} would be needed."
        return
    slower = other.step_seconds / plan.best.step_seconds - 1.0
    yield f"{words} Without it the best step takes {show_seconds(other.step_seconds)} ({slower:+.1%})."


def _tp_words(best: Candidate) -> str:
    tp, per_node = int(best.at.tp[0]), best.question.cluster.devices_per_node
    place = f"inside the {per_node} GPUs of a node" if tp <= per_node else "ACROSS nodes"
    return f"tp={tp}: layers are cut (with sequence parallel between them) {place}."


def _pp_words(best: Candidate) -> str:
    parallel = best.run.parallel
    chunks = f", {parallel.virtual_stages} stages per rank" if parallel.virtual_stages > 1 else ""
    bubble = best.seconds_items.get("bubble", 0.0) / best.step_seconds
    return (
        f"pp={parallel.pp} across nodes with {parallel.schedule}{chunks}: "
        f"{best.run.accumulation} micro-batches leave a bubble of {bubble:.1%} of the step."
    )


def _cp_words(best: Candidate) -> str:
    parallel, length = best.run.parallel, best.question.run.data.sequence_length
    share = f"{length // parallel.cp} of {length} positions"
    return f"cp={parallel.cp} ({parallel.cp_kind}): each rank holds {share}."


def _ep_words(best: Candidate) -> str:
    moe = best.question.run.model.moe
    experts = moe.num_experts if moe else 0
    ep = int(best.at.ep[0])
    share = f"{experts // ep} of {experts} experts"
    return f"ep={ep}: each rank holds {share}, on ranks borrowed from data parallelism."


def _recompute(plan: Plan) -> Iterator[str]:
    best = plan.best
    bits = int(best.at.recompute[0])
    if bits == 0:
        return
    kept = Candidate(plan.question, replace(best.at, recompute=best.at.recompute * 0))
    every = int(best.at.recompute_every[0])
    where = "every layer" if every == 1 else f"one layer in {every}"
    word = "" if bits == FULL else "the cheap part of "
    share = best.seconds_items.get("recompute", 0.0) / best.step_seconds
    without = f"keeping everything would need {show_bytes(kept.device_bytes)}"
    if kept.fits:
        without += f" and take {show_seconds(kept.step_seconds)} per step"
    again = f"{word}{where} is computed again in the backward pass"
    yield f"Recompute: {again}, {share:.1%} of the step; {without}."


def _offload(plan: Plan) -> Iterator[str]:
    best = plan.best
    moved = best.run.memory.offload
    if not moved:
        return
    kept = Candidate(plan.question, replace(best.at, offload=best.at.offload * 0))
    share = best.seconds_items.get("offload", 0.0) / best.step_seconds
    host = sum(best.host_items[best.peak_stage].values())
    yield (
        f"Offload of {' and '.join(moved)}: {show_bytes(host)} per rank in host memory; the copies show for "
        f"{share:.1%} of the step. On the device this layout would need {show_bytes(kept.device_bytes)}"
        + (f" and take {show_seconds(kept.step_seconds)}." if kept.fits else ".")
    )


def _formats(plan: Plan) -> Iterator[str]:
    """What was taken of what is allowed, each with what this very layout would be without it."""
    best = plan.best
    for change in plan.changes:
        section, name = change.key.split(".")
        spec = getattr(best.question.run, section)
        plain = spec.model_copy(update={name: default_of(change)})
        question = replace(best.question, run=best.question.run.model_copy(update={section: plain}))
        without = Candidate(question, best.at)
        seconds, need = show_seconds(without.step_seconds), show_bytes(without.device_bytes)
        other = f"take {seconds} per step and need {need}" + ("" if without.fits else ", and not fit")
        yield f"{change.said()}, as allowed ({change.meaning}): without it this layout would {other}."
    left = [word for word in plan.question.allow if word not in {change.word for change in plan.changes}]
    if left:
        yield (
            f"Allowed and not taken: {', '.join(left)}; no plan with more of a change is "
            f"{TIE_FRACTION:.0%} better."
        )


def _idle(plan: Plan) -> Iterator[str]:
    idle = plan.question.cluster.num_devices - plan.best.num_ranks
    if idle <= 0:
        return
    speed = plan.question.objective == "speed"
    reason = "no layout that uses them is faster" if speed else f"the objective is {plan.question.objective}"
    yield f"{idle} of {plan.question.cluster.num_devices} devices stay idle: {reason}."
