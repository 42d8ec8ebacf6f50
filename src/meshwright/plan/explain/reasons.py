"""Why this layout, technique by technique: data parallel, ZeRO, tp, pp, cp, ep, recompute, offload.

Every sentence has a number that was priced: what the layout would need or take without the technique.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.plan.search.candidate import Candidate, layout_text
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.finetune import longest_context
from meshwright.plan.search.question import Question, price_memory
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.search.what_if import Change, what_if, with_columns
from meshwright.plan.time.step_time import host_share
from meshwright.plan.workload.layouts import FULL, layouts
from meshwright.units import show_bytes, show_count, show_seconds

STATE_ITEMS = ("weights", "gradients", "master", "optimizer")
MIN_FASTER_SHOWN = 0.001
MIN_EXPOSED_SHOWN = 0.0005
SHARDED_BY_ZERO = {
    1: "optimizer states are",
    2: "optimizer states and gradients are",
    3: "optimizer states, gradients and weights are",
}


def explain(plan: Plan) -> list[str]:
    """The reasons for the chosen layout, one sentence or two for each technique that it uses."""
    best = plan.best
    return [
        *_choice(plan),
        *(_state(best) if best.run.adapter is None else _frozen_state(best)),
        *_data_parallel(best),
        *_technique(plan, "tp", _tp_text(best)),
        *_technique(plan, "pp", _pp_text(best)),
        *_technique(plan, "cp", _cp_text(best)),
        *_technique(plan, "ep", _ep_text(best)),
        *_unsharded_experts(plan),
        *_recompute(best),
        *_offload(best),
        *_numerics(plan),
        *_context(plan),
        *_idle(plan),
    ]


def _choice(plan: Plan) -> Iterator[str]:
    """Why the chosen row is not the fastest of the table, where it is not."""
    number, fastest = min(enumerate(plan.top, start=1), key=lambda each: each[1].step_seconds)
    faster = 1.0 - fastest.step_seconds / plan.best.step_seconds
    if faster < MIN_FASTER_SHOWN:
        return
    row = f"Row {number} is {faster:.1%} faster"
    if plan.question.objective == "speed":
        yield f"{row}, which is within {TIE_FRACTION:.0%}: row 1 is chosen because it is simpler."
    else:
        yield f"{row}, but the objective is {plan.question.objective}."


def full_state_bytes(question: Question) -> float:
    """Bytes of weights, gradients and optimizer states of the full model on one device."""
    found = price_memory(question, layouts(num_microbatches=2))
    return float(sum(found.items[name][0, 0] for name in STATE_ITEMS if name in found.items))


def _state(best: Candidate) -> Iterator[str]:
    question, device = best.question, best.question.cluster.device
    full, count = full_state_bytes(question), question.workload.counts.total
    state = (
        f"{question.run.model.family} has {show_count(count)} parameters; "
        f"their full state ({full / count:.0f} B each) is {show_bytes(full)}"
    )
    memory = f"{device.title}, {show_bytes(device.memory_bytes)}"
    if best.num_ranks == 1:
        need = f"{show_bytes(best.device_bytes)} at the peak of a step"
        if best.run.memory.offload:
            on_host = f"With {' and '.join(best.run.memory.offload)} in host memory"
            yield f"{state}. {on_host} the device holds {need}: it fits on one device ({memory})."
        else:
            yield f"{state}, with activations {need}: it fits on one device ({memory})."
    else:
        fits = "fits on" if full < device.memory_bytes else "does not fit on"
        yield f"{state}, which {fits} one device ({memory})."


def _frozen_state(best: Candidate) -> Iterator[str]:
    """The frozen weights and the trained adapters, beside the state of full fine-tuning."""
    question = best.question
    found = price_memory(question, layouts(num_microbatches=2)).items
    frozen, adapters = (float(found[name][0, 0]) for name in ("weights", "adapters"))
    full = full_state_bytes(replace(question, run=question.run.with_(adapter=None)))
    workload = question.workload
    assert workload.adapters is not None
    trained = workload.adapters.share(workload.model.width) * workload.counts.total
    still = (1.0 - workload.adapters.full_share) * workload.counts.total
    yield (
        f"{question.run.model.family} has {show_count(still)} frozen parameters "
        f"({workload.adapters.base_bits / 8:.3g} bytes each, {show_bytes(frozen)}) and {show_count(trained)} "
        f"trained ones ({show_bytes(adapters)} with gradients and moments); full fine-tuning would have "
        f"{show_bytes(full)} of state."
    )
    yield "Time and memory of adapters are by formula, held against 8B on one H200; `rehearse` traces memory."


def _context(plan: Plan) -> Iterator[str]:
    """The longest context of a run with adapters."""
    if plan.best.run.adapter is None:
        return
    longest, positions = longest_context(plan.question), plan.question.run.model.max_positions
    moved = f"{longest.with_offload:,} with host memory (memory.offload)"
    beside = f", {moved}" if longest.with_offload > longest.on_device else ""
    yield (
        f"Longest context that fits, with full recompute: {longest.on_device:,} tokens per sequence{beside} "
        f"(the model has {positions:,} positions)."
    )


def _data_parallel(best: Candidate) -> Iterator[str]:
    parallel = best.run.parallel
    if best.num_ranks == 1 or parallel.dp * parallel.cp == 1:
        return
    if parallel.zero == 0:
        yield _ddp_text(best)
        return
    across = f" in {parallel.dp_replicate} replicas" if parallel.dp_replicate > 1 else ""
    items = best.memory_items[best.peak_stage]
    state = show_bytes(sum(items.get(name, 0.0) for name in (*STATE_ITEMS, "adapters")))
    yield (
        f"ZeRO-{parallel.zero}: {SHARDED_BY_ZERO[parallel.zero]} sharded over "
        f"{parallel.dp_shard * parallel.cp} ranks{across}, which leaves {state} of state per rank. "
        f"{_lower_zero(best)}"
    )


def _ddp_text(best: Candidate) -> str:
    parallel = best.run.parallel
    sharded = what_if(
        with_columns(best, "ZeRO-1", zero=1, dp_shard=parallel.dp_replicate, dp_replicate=parallel.dp_shard)
    )
    saved = show_bytes(best.device_bytes - sharded.device_bytes)
    unsharded = parallel.tp * parallel.pp * parallel.cp == 1
    what = "The full state fits on one GPU" if unsharded else "The sharded state fits on each GPU"
    margin = "" if sharded.step_seconds >= best.step_seconds else f" (to within {TIE_FRACTION:.0%})"
    return (
        f"{what}: DDP over {parallel.dp} ranks is fastest{margin}; ZeRO-1 would save {saved} you do not need."
    )


def _lower_zero(best: Candidate) -> str:
    """What one ZeRO stage less would mean for this layout."""
    parallel = best.run.parallel
    name = f"ZeRO-{parallel.zero - 1}" if parallel.zero > 1 else "DDP"
    unsharded = {} if parallel.zero > 1 else {"dp_shard": 1, "dp_replicate": parallel.dp}
    lower = what_if(with_columns(best, name, zero=parallel.zero - 1, **unsharded))
    need = show_bytes(lower.device_bytes)
    if not lower.fits:
        return f"{name} {'is ' if lower.broken_rule else ''}{lower.reason}."
    slower = lower.step_seconds / best.step_seconds - 1.0
    if slower > 0:
        return f"{name} would fit ({need}) but is {slower:.1%} slower."
    return f"{name} would need {need}."


def _technique(plan: Plan, axis: str, text: str) -> Iterator[str]:
    """An axis that the layout uses, and the best layout without it."""
    if getattr(plan.best.run.parallel, axis) == 1:
        return
    if axis in plan.question.pins.allowed:
        yield f"{text} It is pinned." if len(plan.question.pins.allowed[axis]) == 1 else text
        return
    outcome = plan.without[axis]
    if outcome.candidate is None:
        yield f"{text} Without it no layout satisfies the rules and the pins."
    elif outcome.fits:
        yield f"{text} {_best_other(plan, axis, outcome.candidate, 'Without it')}"
    else:
        yield f"{text} Without it nothing fits: the closest layout needs {_need(outcome.candidate)}."


def _best_other(plan: Plan, axis: str, other: Candidate, which: str) -> str:
    """How long the best layout without (or with) an axis takes; by another objective, what it costs."""
    best = plan.best
    number = next((row for row, one in enumerate(plan.top, start=1) if one.run == other.run), None)
    pin = f"{axis}={getattr(other.run.parallel, axis)}"
    shown = f" (the pin {pin} shows it)" if number is None else f" (row {number})"
    slower = other.step_seconds / best.step_seconds - 1.0
    seconds = f"{show_seconds(other.step_seconds)} ({slower:+.1%})"
    reason = ""
    if slower < 0:
        is_close = -slower <= TIE_FRACTION and best.question.objective == "speed"
        reason = (
            f", within {TIE_FRACTION:.0%} and not as simple"
            if is_close
            else f", but the objective is {best.question.objective}"
        )
    return f"{which} the best step takes {seconds}{reason}, with {layout_text(other.run)}{shown}."


def _need(candidate: Candidate) -> str:
    """The memory that a layout lacks, of the device or of the host."""
    if candidate.excess_bytes <= 0:
        return candidate.over_limit_text
    budget = show_bytes(candidate.question.memory_budget_bytes)
    return f"{show_bytes(candidate.device_bytes)} per device of {budget}"


def _tp_text(best: Candidate) -> str:
    tp, cluster = best.run.parallel.tp, best.question.cluster
    place = ""
    if cluster.num_nodes > 1:
        inside = tp <= cluster.devices_per_node
        place = f", inside the {cluster.devices_per_node} GPUs of a node" if inside else ", ACROSS nodes"
    between = ", with sequence parallel between them" if best.question.module_runtime is None else ""
    return f"tp={tp}: layers are sharded{between}{place}."


def _pp_text(best: Candidate) -> str:
    parallel = best.run.parallel
    chunks = f", {parallel.virtual_stages} stages per rank" if parallel.virtual_stages > 1 else ""
    bubble = best.seconds_items.get("bubble", 0.0) / best.step_seconds
    # Stages are the outermost axis: they share a node where a node has the ranks of several.
    across = " across nodes" if best.num_ranks > best.question.cluster.devices_per_node else ""
    return (
        f"pp={parallel.pp}{across} with {parallel.schedule}{chunks}: "
        f"{best.run.accumulation} micro-batches leave a bubble of {bubble:.1%} of the step."
    )


def _cp_text(best: Candidate) -> str:
    parallel, length = best.run.parallel, best.question.run.data.sequence_length
    share = f"{length // parallel.cp} of {length} positions"
    return f"cp={parallel.cp} ({parallel.cp_kind}): each rank has {share}."


def _ep_text(best: Candidate) -> str:
    moe, ep = best.question.run.model.moe, best.run.parallel.ep
    experts = moe.num_experts if moe else 0
    share = f"{experts // ep} of {experts} experts"
    text = f"ep={ep}: each rank has {share}, on ranks borrowed from data parallelism."
    overlap = best.run.parallel.ep_overlap
    if overlap == "none":
        return text
    return f"{text} ep_overlap={overlap} is priced, but its overlap was not measured on several GPUs."


def _unsharded_experts(plan: Plan) -> Iterator[str]:
    """Why a routed model has no ep: what each layout communicates for its experts, and the best with ep."""
    other = plan.with_ep.candidate if plan.with_ep is not None else None
    if other is None:
        return
    best, counts = plan.best, plan.best.question.workload.counts
    exposed = show_seconds(best.seconds_items.get("fsdp", 0.0))
    here = "every rank has all experts"
    if best.run.parallel.zero == 3:
        size = show_bytes(best.question.framework.state.gather * counts.experts_layer / best.run.parallel.etp)
        tokens = show_count(best.run.data.microbatch_sequences * best.run.data.sequence_length)
        here = (
            f"ZeRO-3 gathers all experts of a layer ({size}) once per pass over {tokens} tokens, "
            f"so that only {exposed} per step of gathers and reduce-scatters are exposed"
        )
    exchange = show_seconds(other.seconds_items.get("ep", 0.0))
    there = f"With ep={other.run.parallel.ep} ranks exchange tokens, {exchange} per step exposed."
    yield f"ep=1: {here}. {there} {_best_other(plan, 'ep', other, 'With ep')}"


def _recompute(best: Candidate) -> Iterator[str]:
    memory = best.run.memory
    if memory.recompute == "none":
        return
    where = "every layer" if memory.recompute_every == 1 else f"one layer in {memory.recompute_every}"
    part = "" if int(best.layout.recompute[0]) == FULL else "the cheap part of "
    share = best.seconds_items.get("recompute", 0.0) / best.step_seconds
    yield (
        f"Recompute (activation checkpointing): {part}{where} is recomputed in the backward pass, "
        f"{share:.1%} of the step; {_without_recompute(best)}."
    )


def _without_recompute(best: Candidate) -> str:
    """What the layout would be with all activations, unless recompute was asked for."""
    if not best.question.pins.permits(recompute=0):
        return "it is pinned"
    without = what_if(with_columns(best, "recompute=none", recompute=0))
    need = f"keeping all activations would need {show_bytes(without.device_bytes)}"
    if without.fits:
        return f"{need} and take {show_seconds(without.step_seconds)} per step"
    if without.device_bytes <= best.question.memory_budget_bytes:
        return f"keeping all activations {'is ' if without.broken_rule else ''}{without.reason}"
    return need


def _offload(best: Candidate) -> Iterator[str]:
    offload = best.run.memory.offload
    if not offload:
        return
    without = what_if(with_columns(best, "offload=none", offload=0))
    exposed = best.seconds_items.get("offload", 0.0) / best.step_seconds
    copies = f"exposed copies take {exposed:.1%} of the step"
    if exposed < MIN_EXPOSED_SHOWN:
        copies = "the copies overlap with compute"
    seconds = f" and take {show_seconds(without.step_seconds)}" if without.fits else ""
    yield (
        f"Offload of {' and '.join(offload)}: {show_bytes(best.host_bytes)} per rank in host memory; "
        f"{copies}. Without offload this layout would need {show_bytes(without.device_bytes)} per device"
        f"{seconds}.{_unmeasured(best)}"
    )


def _unmeasured(best: Candidate) -> str:
    """What the price of offload assumes: it was measured on one device with a host of its own."""
    cluster = best.question.cluster
    facts: list[str] = []
    if cluster.devices_per_node > 1 and cluster.host.name != "c2c":
        share = host_share(cluster)
        rate = "all of its link" if share == 1.0 else f"{share:.2g} of its link"
        facts.append(
            f"each of {cluster.devices_per_node} devices of a node is assumed to get {rate} to the host"
        )
    if best.run.parallel.pp > 1:
        facts.append("copies in a pipeline are assumed to run in both directions at once, beside compute")
    return f" Not measured: {'; '.join(facts)}." if facts else ""


def _numerics(plan: Plan) -> Iterator[str]:
    """The allowed changes that the plan makes, each with this layout without it."""
    run = plan.best.question.run
    for change in plan.changes:
        section, name = change.key.split(".")
        plain = getattr(run, section).model_copy(update={name: change.default})
        question = replace(plan.best.question, run=run.model_copy(update={section: plain}))
        without = what_if(Change(change.name, question, plan.best.layout))
        seconds, need = show_seconds(without.step_seconds), show_bytes(without.device_bytes)
        does_not_fit = "" if without.fits else ", and not fit"
        yield (
            f"{change.setting}, as allowed ({change.meaning}): without it this layout would take {seconds} "
            f"per step and need {need}{does_not_fit}."
        )
    fp8 = run.precision.fp8
    if fp8 is not None and not fp8.experts and run.model.moe is not None:
        yield (
            "Routed experts stay in bf16: in fp8 (precision.fp8.experts=true) a step was measured 7 to 11% "
            "slower on one H200, with 1,024 rows per expert."
        )
    used = {change.name for change in plan.changes}
    unused = [name for name in plan.question.allow if name not in used]
    if unused:
        better = f"no plan with more changes is {TIE_FRACTION:.0%} better"
        yield f"Allowed but not used: {', '.join(unused)}; {better}."


def _idle(plan: Plan) -> Iterator[str]:
    objective, devices = plan.question.objective, plan.question.cluster.num_devices
    idle = devices - plan.best.num_ranks
    if idle == 0:
        return
    if objective != "speed":
        yield f"{idle} of {devices} devices stay idle: the objective is {objective}."
        return
    data = plan.question.run.data
    sequences = max(1, round(data.batch_sequences / devices)) * devices
    batch = f"a batch of {data.batch_sequences} sequences"
    divisible = ""
    if data.batch_sequences % devices:
        tokens = sequences * data.sequence_length
        divisible = f"; {sequences} sequences (--batch-tokens {tokens}) divide evenly over all devices"
    fact = f"{idle} of {devices} devices stay idle"
    yield f"{fact}: with {batch} no layout that uses them is faster{divisible}."
