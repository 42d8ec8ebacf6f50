"""The memory peak of a trace, by the planner's items: weights, gradients, activations and so on."""

import dataclasses
from collections import defaultdict

from meshwright.rehearse.allocation_log import StorageRecord
from meshwright.rehearse.phases import Phase
from meshwright.rehearse.trace import Trace

ITEMS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "cast weights",
    "activations",
    "working set",
    "logits",
    "exchange",
    "batch",
)


@dataclasses.dataclass(frozen=True)
class Peak:
    """Live bytes just after one event; for `step_peak`, the event after which most bytes are live."""

    allocated_bytes: int
    phase: Phase
    """The phase that the event falls into."""
    items: dict[str, int]
    live: list[tuple[StorageRecord, int]]
    """Storages that are live then and their bytes, largest first."""


def peaks_by_phase(trace: Trace) -> dict[int, tuple[int, int]]:
    """By phase id of the last step: the most live bytes, and the index of the event that reached them."""
    peaks: dict[int, tuple[int, int]] = {}
    total = 0
    for index, event in enumerate(trace.events):
        total += event.num_bytes
        if index >= trace.step_begins_at and total > peaks.get(event.phase_id, (0, 0))[0]:
            peaks[event.phase_id] = (total, index)
    return peaks


def step_peak(trace: Trace) -> Peak:
    """The memory peak of the last step."""
    _, index = max(peaks_by_phase(trace).values())
    return peak_at(trace, index)


def peak_at(trace: Trace, index: int) -> Peak:
    """What is live just after the event of this index."""
    live: dict[int, tuple[int, int]] = {}
    for event in trace.events[: index + 1]:
        if event.num_bytes > 0:
            live[event.number] = (event.num_bytes, event.phase_id)
        else:
            live.pop(event.number, None)
    phase = trace.phases[trace.events[index].phase_id]
    items: dict[str, int] = defaultdict(int)
    for number, (num_bytes, made_at) in live.items():
        items[item_of(trace.records[number], trace.phases[made_at], phase)] += num_bytes
    held = sorted(
        ((trace.records[number], num_bytes) for number, (num_bytes, _) in live.items()),
        key=lambda pair: -pair[1],
    )
    return Peak(sum(items.values()), phase, {name: items[name] for name in ITEMS if items[name]}, held)


def item_of(record: StorageRecord, made: Phase, now: Phase) -> str:
    """The planner's item of a storage that was allocated in phase `made` and is live in phase `now`."""
    if record.kind is not None:
        return record.kind
    if made.part in ("head", "loss", "after head"):
        return "logits"
    if made.kind == "forward" and (now.kind != "forward" or made != now):
        return "activations"
    return "working set"
