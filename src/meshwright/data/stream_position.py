"""A position in a stream of samples as plain data: a few integers and texts, on any number of ranks."""

from collections.abc import Mapping
from typing import Any

from meshwright.data.stream import Stream
from meshwright.errors import DataError


def position_state(stream: Stream, position: int, num_batches: int) -> dict[str, Any]:
    """The position after `num_batches` batches, the stream that it counts in, and what that depends on."""
    return {
        "position": position,
        "stream": stream.number,
        "num_batches": num_batches,
        "facts": dict(stream.facts),
    }


def require_same_stream(stream: Stream, state: Mapping[str, Any]) -> None:
    """DataError where a saved position counts in another stream; names what has changed."""
    saved = state.get("facts", {})  # checkpoints of earlier versions have none
    changes = [
        f"{name} was {saved[name]}, is {now}"
        for name, now in stream.facts.items()
        if name in saved and saved[name] != now
    ]
    changes += [f"{name} was {then}, is not set" for name, then in saved.items() if name not in stream.facts]
    if state["stream"] == stream.number and not changes:
        return
    reasons = f": {'; '.join(changes)}" if changes else ""
    raise DataError(
        f"the saved position {state['position']} is from another dataset or another sample order{reasons}",
        where=stream.samples.name,
        hint="use the dataset, sequence length, holdout, shuffle and seed of the saved run",
    )
