"""When no layout is left: which pins contradict which rule, or the smallest changes that would fit."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from meshwright.errors import MeshwrightError, PlanError, SpecError
from meshwright.hardware.catalogue import Cluster, built_in_devices, generic_cluster
from meshwright.plan.explain.reasons import least_bytes
from meshwright.plan.search.allow import Variant, parse_allow, single_changes, variants
from meshwright.plan.search.choose_precision import choose_precision, with_run
from meshwright.plan.search.decision import RECOMPUTE_NAMES, Candidate, Plan, choose, no_fit_error
from meshwright.plan.search.pins import KEY_OF_COLUMN, Pins
from meshwright.plan.search.question import Question
from meshwright.plan.search.search import search
from meshwright.plan.workload.layouts import CP_KINDS
from meshwright.plan.workload.schedules import SCHEDULES, V_SHAPED
from meshwright.spec.check import check
from meshwright.units import show_bytes, show_seconds

MAX_DEVICES = 2**17


def plan_or_relax(question: Question, *, top: int = 8) -> Plan:
    """The plan; or an error that says which pin to drop, or what would make it fit, each with its number."""
    start = time.perf_counter()
    settled = choose_precision(question)
    seconds = time.perf_counter() - start
    if len(settled.found.fitting):
        return choose(settled, top=top, search_seconds=seconds)
    if settled.found.least_memory is None:
        raise contradiction(question)
    error = no_fit_error(question, settled.found)
    raise PlanError(error.fact, where=error.where, hint=_hint(question))


def _has_no_layout(question: Question) -> bool:
    found = search(question, ranks=_upper_half(question))
    return found.least_memory is None and len(found.fitting) == 0


def _upper_half(question: Question) -> range:
    """World sizes from half of the cluster up: enough to tell whether something is possible at all."""
    return range(max(1, question.cluster.num_devices // 2), question.cluster.num_devices + 1)


def contradiction(question: Question) -> SpecError:
    """Pins that exclude each other, or the model: the rule they break, and which one to drop."""
    pins = question.pins
    said = " ".join(pins.said[column] for column in pins.allowed)
    free = [
        column for column in pins.allowed if not _has_no_layout(replace(question, pins=pins.without(column)))
    ]
    advice = " or ".join(f"drop {pins.said[column]}" for column in free) or "drop some of them"
    return SpecError(f"no layout satisfies {said}: {_broken_rule(question)}", where="pins", hint=advice)


def _broken_rule(question: Question) -> str:
    """The first rule that the pinned values break when written into the run as they are."""
    run, pins = question.run, question.pins
    first = {column: values[0] for column, values in pins.allowed.items()}
    parallel = {name: value for name, value in first.items() if KEY_OF_COLUMN[name].startswith("parallel.")}
    words: dict[str, object] = dict(parallel)
    if "schedule" in parallel:
        words["schedule"] = SCHEDULES[parallel["schedule"]]
        words.setdefault("virtual_stages", 2 if words["schedule"] in V_SHAPED else 1)
    if "cp_kind" in parallel:
        words["cp_kind"] = CP_KINDS[parallel["cp_kind"]]
    if parallel.get("dp_shard", 1) > 1:
        words.setdefault("zero", 3)
    data = {"microbatch_sequences": first.get("microbatch_sequences", 1)}
    recompute = {
        "recompute": RECOMPUTE_NAMES[first.get("recompute", 0)],
        "recompute_every": first.get("recompute_every", 1),
    }
    try:
        pinned = run.with_(
            parallel=run.parallel.with_(**words),
            data=run.data.with_(**data),
            memory=run.memory.with_(**recompute),
        )
    except (MeshwrightError, ValueError) as error:
        return str(error).splitlines()[0]
    violations = check(pinned)
    if violations:
        return violations[0].fact
    devices, ranks = question.cluster.num_devices, first.get("num_ranks", pinned.parallel.num_ranks)
    if ranks > devices:
        return f"they need {ranks} ranks, and the cluster has {devices} devices"
    return (
        f"no mesh of at most {devices} devices has them and divides the batch of "
        f"{run.data.batch_sequences} sequences"
    )


def _hint(question: Question) -> str:
    """Everything that would make it fit, the least intrusive first."""
    ways = [
        *_unpinned(question),
        *_offload(question),
        *_more_devices(question),
        *_shorter(question),
        *_formats(question),
    ]
    ways += _other_device(question)
    if not ways:
        return "no single change makes it fit: use a smaller model"
    return "any one of these:" + "".join(f"\n         - {way}" for way in ways)


def _fit_words(question: Question) -> str | None:
    """`61.2 GiB per device, 1.3 s per step` when something fits."""
    found = search(question, ranks=_upper_half(question))
    if len(found.fitting) == 0:
        return None
    row = int(found.fitting.step_seconds.argmin())
    candidate = Candidate(question, found.fitting.layouts.take([row]))
    moved = candidate.run.memory.offload
    host = f" with {' and '.join(moved)} on the host" if moved else ""
    need, seconds = show_bytes(candidate.device_bytes), show_seconds(candidate.step_seconds)
    return f"{need} per device, {seconds} per step{host}"


def _unpinned(question: Question) -> Iterator[str]:
    for column in question.pins.allowed:
        relaxed = replace(question, pins=question.pins.without(column))
        words = _fit_words(relaxed)
        if words is not None:
            yield f"drop {question.pins.said[column]} ({words})"


def _offload(question: Question) -> Iterator[str]:
    """Host memory, where the user has said what lives there."""
    if question.may_offload or question.cluster.device.name == "cpu":
        return
    said = [word for word in question.pins.overrides if word.partition("=")[0].strip() == "memory.offload"]
    overrides = tuple(word for word in question.pins.overrides if word not in said)
    pins = Pins(question.pins.allowed, question.pins.said, overrides)
    run = question.run.with_(memory=question.run.memory.with_(offload=()))
    words = _fit_words(replace(question, pins=pins, run=run))
    if words is not None:
        yield f"drop {said[0] if said else 'memory.offload'} ({words})"


def _more_devices(question: Question) -> Iterator[str]:
    cluster = question.cluster
    for count in _larger(cluster):
        larger = replace(question, cluster=cluster.with_devices(count))
        if least_bytes(larger) <= larger.memory_budget_bytes:
            words = _fit_words(larger)
            if words is not None:
                yield f"{count} devices instead of {cluster.num_devices} ({words})"
                return


def _larger(cluster: Cluster) -> Iterator[int]:
    """The next sizes: whole nodes, doubling."""
    full = max(cluster.devices_per_node, cluster.device.devices_per_node)
    count = cluster.num_devices
    while count < MAX_DEVICES:
        count = 2 * count if count < full or count % full == 0 else -(-count // full) * full
        yield count


def _shorter(question: Question) -> Iterator[str]:
    length = question.run.data.sequence_length
    while length > 512:
        length //= 2
        data = question.run.data
        sequences = data.batch_sequences * (data.sequence_length // length)
        changed = data.with_(sequence_length=length, batch_sequences=sequences)
        words = _fit_words(replace(question, run=question.run.with_(data=changed)))
        if words is not None:
            yield f"--seq {length} ({words})"
            return


def _formats(question: Question) -> Iterator[str]:
    """Every single change of formats that would do, or the least of several."""
    device, pinned = question.cluster.device, question.pins.overrides
    found = False
    for variant in single_changes(question.run, question.allow, pinned, device):
        words = _fit_words(with_run(question, variant))
        if words is not None:
            found = True
            change = variant.changes[0]
            yield f"--allow {change.word}: {change.meaning} ({words})"
    if not found and set(parse_allow("all")) - set(question.allow):
        listed = variants(question.run, (*parse_allow("all"), *question.allow), pinned, device)
        yield from islice(_combinations(question, listed), 1)


def _combinations(question: Question, listed: list[Variant]) -> Iterator[str]:
    """Those of several changes that would do, the least change first."""
    for variant in listed:
        changed = with_run(question, variant)
        if least_bytes(changed) <= changed.memory_budget_bytes:
            words = _fit_words(changed)
            if words is not None:
                yield f"--allow {','.join(change.word for change in variant.changes)} ({words})"


def _other_device(question: Question) -> Iterator[str]:
    """The device with the least memory above this one that would do, as many of them."""
    cluster = question.cluster
    known = sorted(built_in_devices().values(), key=lambda device: device.memory_bytes)
    for device in known:
        if device.memory_bytes <= cluster.device.memory_bytes or device.name == "cpu":
            continue
        if question.work.matmul_rate not in device.peak_flops_per_second:
            continue
        other = replace(
            generic_cluster(device), num_nodes=cluster.num_nodes, devices_per_node=cluster.devices_per_node
        )
        words = _fit_words(replace(question, cluster=other))
        if words is not None:
            yield f"{cluster.num_devices} x {device.title} ({words})"
            return
