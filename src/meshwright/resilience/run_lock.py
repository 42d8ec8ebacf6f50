"""One writer for one run directory: a lock file that names its owner, also on a network file system.

The lock is made by a hard link, which is atomic on NFS too, and holds host, process id and start time. On the
owner's host a dead owner is recognised by its process; on another host by a lock file that is no longer
touched. The lock of a dead owner is taken over, with a line on stderr. Imports no torch.
"""

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from meshwright.errors import SpecError
from meshwright.files import MIB, read_json_file

LOCK = ".lock"
TOUCH_SECONDS = 10.0
# An owner on another host is dead when its lock was not touched for this long: six touches missed.
STALE_SECONDS = 60.0


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of an existing run directory while inside; SpecError where another process holds it."""
    path, owner = run_dir / LOCK, _this_process()
    _acquire(path, owner)
    is_over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, is_over), name="run-lock", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        is_over.set()
        toucher.join()
        if _read(path) == owner:  # else the directory was moved, or somebody has taken the lock over
            with suppress(OSError):
                path.unlink()


def release_lost_lock(run_dir: Path, lost_hosts: Collection[str]) -> None:
    """Remove the lock of a process on one of these hosts, which are known to be lost, before it is stale."""
    path = run_dir / LOCK
    if _read(path).get("host") in lost_hosts:
        with suppress(OSError):
            path.unlink()


def _acquire(path: Path, owner: dict[str, Any]) -> None:
    draft = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    draft.write_text(json.dumps(owner))
    try:
        for _ in range(3):  # a second process may take over the same dead lock at the same time
            with suppress(FileExistsError):
                os.link(draft, path)
                return
            _take_over(path, draft)
        raise _refusal(path, _read(path))
    finally:
        draft.unlink(missing_ok=True)


def _take_over(path: Path, draft: Path) -> None:
    """Remove the lock of a dead owner; refuse where the owner lives."""
    other = _read(path)
    if _is_alive(path, other, draft):
        raise _refusal(path, other)
    aside = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # somebody was faster
        os.rename(path, aside)
        aside.unlink()
        print(f"note: took over {path.parent} from {_name(other)}, which has ended", file=sys.stderr)


def _is_alive(path: Path, owner: dict[str, Any], draft: Path) -> bool:
    if owner.get("host") == socket.gethostname() and owner.get("boot") == _boot_id():
        return _start_time(owner.get("pid")) == owner.get("started_at")
    try:
        os.utime(draft)  # both times are of the file server's clock
        return draft.stat().st_mtime - path.stat().st_mtime < STALE_SECONDS
    except FileNotFoundError:
        return False


def _refusal(path: Path, owner: dict[str, Any]) -> SpecError:
    return SpecError(
        f"{_name(owner)} is training into this directory",
        where=str(path.parent),
        hint="wait for it, stop it, or name another directory with --dir",
    )


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot_id(), "pid": pid, "started_at": _start_time(pid)}


def _start_time(pid: object) -> float | None:
    """When a process of this host was started; None where there is none with this id."""
    if not isinstance(pid, int):
        return None
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None


def _boot_id() -> float:
    """Process ids mean nothing after a restart of the host, nor in another container."""
    return round(psutil.boot_time())


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json_file(path, max_bytes=MIB)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _touch(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(TOUCH_SECONDS):
        with suppress(OSError):
            os.utime(path)
