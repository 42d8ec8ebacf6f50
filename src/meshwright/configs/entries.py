"""What became of each key of a config file: mapped, changed or refused, with the reason."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import SpecError
from meshwright.spec.violations import show_value

Status = Literal["mapped", "changed", "refused"]
LAYOUT_SECTIONS = ("parallel", "precision", "memory")
"""Sections of a run that decide memory, speed and numerics: an exporter must not lose a key of them."""


@dataclass(frozen=True)
class Entry:
    """One key, its value, and what it became on the other side."""

    key: str
    value: Any
    status: Status
    to: str = ""
    """The settings on the other side, such as `parallel.zero=3`; empty where there is none."""
    reason: str = ""
    is_blocking: bool = False
    """Whether nothing is written because of this key, unless the user asks to skip refused keys."""

    def document(self) -> dict[str, Any]:
        """The entry as JSON."""
        return {
            "key": self.key,
            "value": self.value,
            "status": self.status,
            "to": self.to,
            "reason": self.reason,
        }


def show_settings(settings: dict[str, Any]) -> str:
    """`parallel.zero=3, parallel.tp=2`."""
    return ", ".join(f"{key}={show_value(value).strip(chr(39))}" for key, value in settings.items())


def show_entries(entries: Sequence[Entry]) -> str:
    """The table for the terminal: refused keys first, then changed ones, then mapped ones."""
    order = {"refused": 0, "changed": 1, "mapped": 2}
    shown = sorted(entries, key=lambda entry: order[entry.status])
    keys = [f"{entry.key}={show_value(entry.value).strip(chr(39))}" for entry in shown]
    width = min(max(map(len, keys), default=0), 60)
    lines = [
        f"{entry.status:<8} {key:<{width}}  {_outcome(entry)}" for entry, key in zip(shown, keys, strict=True)
    ]
    return "\n".join([*lines, _counts(entries)])


def _outcome(entry: Entry) -> str:
    return ": ".join(part for part in (entry.to, entry.reason) if part) or "the same here, no setting needed"


def _counts(entries: Iterable[Entry]) -> str:
    statuses = [entry.status for entry in entries]
    counts = [f"{statuses.count(status)} {status}" for status in ("mapped", "changed", "refused")]
    return f"{len(statuses)} keys: {', '.join(counts)}"


def require_complete(entries: Sequence[Entry], *, where: str) -> None:
    """SpecError that names the refused keys; the caller has printed the table."""
    refused = [entry.key for entry in entries if entry.is_blocking]
    if refused:
        raise SpecError(
            f"{len(refused)} keys cannot be mapped: {', '.join(refused)}",
            where=where,
            hint="remove them, or leave them out with --skip-refused; nothing was written",
        )
