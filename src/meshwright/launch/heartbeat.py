"""Where each rank is: a small file per rank in the run directory, written by the rank. Imports no torch."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from meshwright.spec.resilience import Phase

_FILE_BYTES = 512


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of progress of one rank."""

    rank: int
    host: str
    pid: int
    step: int
    """Steps that are done."""
    phase: Phase
    at: float
    """Seconds since 1970 on the clock of the rank's host."""


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return run_dir / "heartbeats" / f"rank-{rank}.json"


class HeartbeatFile:
    """Overwrites one file in place: one small write, and readers see the old or the new heartbeat."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, heartbeat: Heartbeat) -> None:
        """Replace the content; always the same number of bytes."""
        text = json.dumps(asdict(heartbeat))
        os.pwrite(self._file, text.encode()[: _FILE_BYTES - 1].ljust(_FILE_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class HeartbeatReader:
    """Reads the heartbeats of one process; the file stays open, so the run directory may be renamed."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self._pid = path, pid
        self._file: int | None = None

    def read(self) -> Heartbeat | None:
        """The heartbeat of the process; None while there is none, or only that of an earlier process."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            found = _parse(os.pread(self._file, _FILE_BYTES, 0))
        except OSError:
            return None
        if found is not None and found.pid == self._pid:
            return found
        self.close()
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
        self._file = None


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The heartbeat in a file; None where there is none."""
    try:
        with path.open("rb") as file:
            return _parse(file.read(_FILE_BYTES))
    except OSError:
        return None


def _parse(text: bytes) -> Heartbeat | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    values = cast(dict[str, Any], found)
    is_valid = (
        set(values) == set(Heartbeat.__dataclass_fields__)
        and all(type(values[name]) is int for name in ("rank", "pid", "step"))
        and isinstance(values["host"], str)
        and values["phase"] in get_args(Phase)
        and isinstance(values["at"], int | float)
    )
    return Heartbeat(**values) if is_valid else None


def read_heartbeats(run_dir: Path, num_ranks: int) -> list[Heartbeat]:
    """The heartbeats of all ranks that have one, in the order of ranks."""
    found = (read_heartbeat(heartbeat_path(run_dir, rank)) for rank in range(num_ranks))
    return [heartbeat for heartbeat in found if heartbeat is not None]


def remove_heartbeats(run_dir: Path, *, first_rank: int) -> None:
    """Remove the heartbeats of this rank and all after it, which a run with fewer ranks has no more."""
    for path in (run_dir / "heartbeats").glob("rank-*.json"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= first_rank:
            with suppress(OSError):
                path.unlink()
