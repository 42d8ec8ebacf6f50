"""Why a question has no plan: the pins contradict a rule, or nothing fits and these changes would."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import built_in_devices, generic_cluster
from meshwright.plan.predict import layout_of
from meshwright.plan.search.allow import Variant, parse_allow, single_changes, variants
from meshwright.plan.search.candidate import Candidate, layout_text
from meshwright.plan.search.choose_precision import ChosenPrecision
from meshwright.plan.search.question import Question
from meshwright.plan.search.search import least_memory_use
from meshwright.plan.search.what_if import Change, Outcome, fitting, what_if
from meshwright.plan.workload.schedules import SCHEDULES, V_SHAPED
from meshwright.spec.adapter import NF4_FORMATS
from meshwright.spec.check import check
from meshwright.units import show_bytes

MAX_DEVICES = 2**17
MIN_SEQUENCE_LENGTH = 512


def infeasible(question: Question, chosen: ChosenPrecision) -> PlanError | SpecError:
    """The error for a question without a plan; `chosen` is what came closest."""
    if chosen.result.closest is None:
        return _contradiction(question)
    closest = Candidate(chosen.question, chosen.result.closest.layouts)
    need = f"{show_bytes(closest.device_bytes)} per device of {show_bytes(question.memory_budget_bytes)}"
    if closest.excess_bytes <= 0:
        need = closest.over_limit_text
    devices = f"{question.cluster.num_devices} x {question.cluster.device.title}"
    fact = f"{question.run.model.family} does not fit on {devices}"
    layout = layout_text(closest.run)
    return PlanError(
        f"{fact}: the layout that comes closest ({layout}) needs {need}", where="--on", hint=_hint(question)
    )


def _hint(question: Question) -> str:
    """Every change that would make it fit, the least intrusive first."""
    ways = [
        *fitting(_without_pins(question)),
        *fitting(_without_offload_pin(question)),
        *fitting(_smaller_base(question)),
        *fitting(_more_devices(question), limit=1),
        *fitting(_shorter_sequences(question), limit=1),
        *_other_numerics(question),
        *fitting(_larger_devices(question), limit=1),
    ]
    if not ways:
        return "no single change makes it fit: use a smaller model"
    return "any one of these:" + "".join(f"\n         - {outcome.text}" for outcome in ways)


def _change(text: str, question: Question) -> Change:
    """A change to price on at least half of the cluster, which is enough to see whether something fits."""
    devices = question.cluster.num_devices
    return Change(text, question, range(max(1, devices // 2), devices + 1))


def _without_pins(question: Question) -> Iterator[Change]:
    pins = question.pins
    for column in pins.allowed:
        yield _change(f"drop {pins.texts[column]}", replace(question, pins=pins.without(column)))


def _without_offload_pin(question: Question) -> Iterator[Change]:
    """The question with offload decided by the search, where the user set it."""
    if question.may_offload or question.cluster.device.name == "cpu":
        return
    pin = question.pins.override_of("memory.offload")
    overrides = tuple(text for text in question.pins.overrides if text != pin)
    run = question.run.with_(memory=question.run.memory.with_(offload=()))
    changed = replace(question, pins=replace(question.pins, overrides=overrides), run=run)
    yield _change(f"drop {pin or 'memory.offload'}", changed)


def _smaller_base(question: Question) -> Iterator[Change]:
    """The question with frozen weights in 4 bits (QLoRA), where it has adapters on larger ones."""
    adapter = question.run.adapter
    pin = question.pins.override_of("adapter.base")
    if adapter is None or adapter.base in NF4_FORMATS or pin is not None:
        return
    changed = question.run.with_(adapter=adapter.with_(base="nf4"))
    if not check(changed):
        yield _change("adapter.base=nf4 (QLoRA)", replace(question, run=changed))


def _more_devices(question: Question) -> Iterator[Change]:
    """The next larger clusters: full nodes, doubling."""
    cluster = question.cluster
    full = max(cluster.devices_per_node, cluster.device.devices_per_node)
    # A node that the user made of fewer devices than its kind has is filled up first.
    nodes = replace(cluster, num_nodes=1, devices_per_node=full)
    count = cluster.num_devices
    while count < MAX_DEVICES:
        count = 2 * count if 2 * count <= full or count % full == 0 else -(-(count + 1) // full) * full
        larger = replace(question, cluster=nodes.with_devices(count))
        if least_memory_use(larger) <= 1.0:
            yield _change(f"{count} devices instead of {cluster.num_devices}", larger)


def _shorter_sequences(question: Question) -> Iterator[Change]:
    """Sequences of half the length, a quarter and so on, with as many tokens in the batch."""
    data = question.run.data
    length = data.sequence_length
    while length > MIN_SEQUENCE_LENGTH:
        length //= 2
        sequences = data.batch_sequences * (data.sequence_length // length)
        changed = data.with_(sequence_length=length, batch_sequences=sequences)
        yield _change(f"--seq {length}", replace(question, run=question.run.with_(data=changed)))


def _other_numerics(question: Question) -> list[Outcome]:
    """Every single change of the numerics that is enough; where none is, the smallest combination."""
    found = list(fitting(_allowing(single_changes(question))))
    if found:
        return found
    everything = replace(question, allow=(*parse_allow("all"), *question.allow))
    if set(everything.allow) == set(question.allow):
        return []
    listed = (each for each in variants(everything) if least_memory_use(each.question) <= 1.0)
    return list(fitting(_allowing(listed), limit=1))


def _allowing(listed: Iterable[Variant]) -> Iterator[Change]:
    for variant in listed:
        names = ",".join(change.name for change in variant.changes)
        meaning = f": {variant.changes[0].meaning}" if len(variant.changes) == 1 else ""
        yield _change(f"--allow {names}{meaning}", variant.question)


def _larger_devices(question: Question) -> Iterator[Change]:
    """As many devices of another type, from the least memory above this one on."""
    cluster = question.cluster
    for device in sorted(built_in_devices().values(), key=lambda device: device.memory_bytes):
        if device.memory_bytes <= cluster.device.memory_bytes or device.name == "cpu":
            continue
        if question.workload.matmul_rate in device.peak_flops_per_second:
            other = replace(
                generic_cluster(device),
                num_nodes=cluster.num_nodes,
                devices_per_node=cluster.devices_per_node,
            )
            yield _change(f"{cluster.num_devices} x {device.title}", replace(question, cluster=other))


def _contradiction(question: Question) -> SpecError:
    """Pins that exclude each other or the model: the rule that they break, and which one to drop."""
    pinned = " ".join(question.pins.texts[column] for column in question.pins.allowed)
    enough = [change.text for change in _without_pins(question) if what_if(change).candidate is not None]
    hint = " or ".join(enough) or "drop some of them"
    return SpecError(f"no layout satisfies {pinned}: {_broken_rule(question)}", where="pins", hint=hint)


def _broken_rule(question: Question) -> str:
    """The first rule that the pinned values break when they are written into the run."""
    columns = {column: values[0] for column, values in question.pins.allowed.items()}
    world = columns.pop("num_ranks", None)
    if columns.get("dp_shard", 1) > 1:
        columns.setdefault("zero", 3)
    if "schedule" in columns and SCHEDULES[columns["schedule"]] in V_SHAPED:
        columns.setdefault("virtual_stages", 2)
    pinned = Candidate(question, layout_of(question.run)).with_columns(**columns)
    violations, devices = check(pinned.run), question.cluster.num_devices
    if violations:
        return violations[0].fact
    if (world or pinned.num_ranks) > devices:
        return f"they need {world or pinned.num_ranks} ranks, and the cluster has {devices} devices"
    batch = f"the batch of {question.run.data.batch_sequences} sequences"
    return f"no mesh of at most {devices} devices has them and divides {batch}"
