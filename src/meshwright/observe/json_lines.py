"""The end of a file of JSON lines that grows."""

import json
import os
from pathlib import Path
from typing import Any

from meshwright.files import regular_file

_MAX_BYTES = 64 << 20


def last_lines(path: Path, max_lines: int, *, max_bytes: int = _MAX_BYTES) -> list[bytes]:
    """The last complete lines of a file, within its last `max_bytes`; none where it cannot be read."""
    try:
        with regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes).split(b"\n")[-max_lines - 1 : -1]
    except OSError:
        return []


def row_of_step(line: bytes) -> dict[str, Any] | None:
    """The object of a line, where it is one with a whole number as its `step`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
