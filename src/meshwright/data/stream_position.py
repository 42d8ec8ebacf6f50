"""A position in a stream of samples as plain data: a few integers and texts, on any number of ranks.

The facts of a stream are what its order depends on, by name. They are saved with a position, so that one of
another stream is refused with the reason.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from meshwright.errors import DataError

_MAX_FACT_LETTERS = 48


def fact_text(value: object) -> str:
    """A value as a short text: itself, or its beginning and a hash where it is long."""
    if isinstance(value, list):
        value = ", ".join(str(tuple(one) if isinstance(one, tuple) else one) for one in value)
    text = str(value)
    if len(text) <= _MAX_FACT_LETTERS:
        return text
    return f"{text[:24]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def facts_number(facts: Mapping[str, str]) -> int:
    """A hash of facts. Its 48 bits are exact in JSON and in a float64."""
    return int(hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:12], 16)


def require_same_stream(
    state: Mapping[str, Any], *, facts: Mapping[str, str], number: int, where: str
) -> None:
    """DataError where a saved position counts in another stream; names what has changed."""
    saved = state.get("facts", {})  # checkpoints of earlier versions have none
    changes = [
        f"{name} was {saved[name]}, is {now}"
        for name, now in facts.items()
        if name in saved and saved[name] != now
    ]
    changes += [f"{name} was {then}, is not set" for name, then in saved.items() if name not in facts]
    if state["stream"] == number and not changes:
        return
    reasons = f": {'; '.join(changes)}" if changes else ""
    raise DataError(
        f"the saved position {state['position']} is from another dataset or another sample order{reasons}",
        where=where,
        hint="use the dataset, sequence length, holdout, shuffle and seed of the saved run",
    )
