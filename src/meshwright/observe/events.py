"""events-<rank>.jsonl: the events of one rank, one JSON object per line.

Every line has `time` (seconds since 1970), `kind`, `rank` and `host`; the rest are the fields of
that kind. Fields are plain numbers, texts or lists of them: a mapping is refused, so that no
environment can be written by accident, and credentials inside addresses are masked.
"""

import json
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from meshwright.files import regular_file
from meshwright.observe.metrics import to_json

EventKind = Literal[
    "start",
    "resume",
    "change",
    "checkpoint",
    "local_checkpoint",
    "upload",
    "evaluate",
    "early_stop",
    "overflow",
    "skip",
    "rollback",
    "prediction",
    "fp8_comparison",
    "straggler",
    "warning",
    "restart",
    "time",
    "interrupt",
    "failure",
    "finish",
]
Event = dict[str, Any]
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_RESERVED = frozenset({"time", "kind", "rank", "host"})


def events_path(run_dir: Path | str, rank: int) -> Path:
    """The file to which a rank writes its events."""
    return Path(run_dir) / f"events-{rank}.jsonl"


class EventWriter:
    """Appends events of this rank; every rank may have one. Use as a context."""

    def __init__(self, run_dir: Path | str, rank: int) -> None:
        self._rank = rank
        self._host = socket.gethostname()
        path = events_path(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A killed process may have left an incomplete line: the first line of this one starts on a new line.
        needs_newline = path.exists() and _last_byte(path) not in (b"", b"\n")
        self._file: BinaryIO = path.open("ab", buffering=0)
        if needs_newline:
            self._file.write(b"\n")

    def write(self, kind: EventKind, **fields: Any) -> None:
        """Write one event, with the time of this call; unbuffered, so a killed process loses none."""
        for name, value in fields.items():
            assert name not in _RESERVED, f"event field {name!r} is written by the writer itself"
            assert not isinstance(value, Mapping), f"event field {name!r} is a mapping"
        facts = {"time": time.time(), "kind": kind, "rank": self._rank, "host": self._host}
        line = to_json(facts | {name: without_credentials(value) for name, value in fields.items()})
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path | str) -> list[Event]:
    """The well-formed events of one file in order; a missing or unreadable file has none."""
    try:
        with regular_file(path) as file:
            return [event for event in map(_parse, file) if event is not None]
    except OSError:
        return []


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1)


def without_credentials(value: Any) -> Any:
    """The value with the credentials inside addresses masked."""
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    return _CREDENTIALS.sub("***", value) if isinstance(value, str) else value


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("kind"), str)
    return event if is_event and isinstance(event.get("time"), int | float) else None
