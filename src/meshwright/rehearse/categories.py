"""From the events of a trace to bytes by item, as the planner names them, at the fullest moment."""

import dataclasses
from collections import defaultdict

from meshwright.rehearse.ledger import Held
from meshwright.rehearse.phases import Moment
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
    """The fullest moment of a step."""

    allocated_bytes: int
    moment: Moment
    items: dict[str, int]
    live: list[tuple[Held, int]]
    """What held bytes then, largest first."""


def fullest_by_moment(trace: Trace) -> dict[int, tuple[int, int]]:
    """Largest live bytes of each moment of the last step, and the index of the event that reached them."""
    fullest: dict[int, tuple[int, int]] = {}
    total = 0
    for index, event in enumerate(trace.events):
        total += event.num_bytes
        if index >= trace.step_begins_at and total > fullest.get(event.moment, (0, 0))[0]:
            fullest[event.moment] = (total, index)
    return fullest


def peak_of(trace: Trace) -> Peak:
    """The peak of the last step."""
    _, index = max(fullest_by_moment(trace).values())
    return peak_at(trace, index)


def peak_at(trace: Trace, index: int) -> Peak:
    """What is held just after one event."""
    live: dict[int, tuple[int, int]] = {}
    for event in trace.events[: index + 1]:
        if event.num_bytes > 0:
            live[event.number] = (event.num_bytes, event.moment)
        else:
            live.pop(event.number, None)
    moment = trace.moments[trace.events[index].moment]
    items: dict[str, int] = defaultdict(int)
    for number, (num_bytes, made_at) in live.items():
        items[item_of(trace.records[number], trace.moments[made_at], moment)] += num_bytes
    held = sorted(
        ((trace.records[number], num_bytes) for number, (num_bytes, _) in live.items()),
        key=lambda pair: -pair[1],
    )
    return Peak(sum(items.values()), moment, {name: items[name] for name in ITEMS if items[name]}, held)


def item_of(record: Held, made: Moment, now: Moment) -> str:
    """The planner's item of a storage that exists at a moment."""
    if record.kind is not None:
        return record.kind
    if made.part in ("head", "loss", "after head"):
        return "logits"
    if made.phase == "forward" and (now.phase != "forward" or made != now):
        return "activations"
    return "working set"
