"""Reads files that someone else may have written: bounded in size, never blocking on a pipe or a device."""

import errno
import glob
import json
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20


def read_bounded(path: Path | str, *, max_bytes: int) -> bytes:
    """The content of a regular file. OSError, with its `strerror` set, for anything else or a larger file."""
    with regular_file(path) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        limit = f"{max_bytes // MIB} MiB" if max_bytes >= MIB else f"{max_bytes} bytes"
        raise OSError(errno.EFBIG, f"it is larger than {limit}", str(path))
    return content


def regular_file(path: Path | str) -> BinaryIO:
    """The opened file; OSError where the path is a pipe, a device or a folder."""
    # O_NONBLOCK: opening a FIFO in the place of the file must not wait for a writer.
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stream


def read_text(path: Path | str, *, max_bytes: int = MIB) -> str:
    """The UTF-8 text of a file; UnicodeDecodeError where it is none."""
    return read_bounded(path, max_bytes=max_bytes).decode("utf-8-sig")


def read_json_file(path: Path | str, *, max_bytes: int) -> Any:
    """The value in a JSON file; ValueError where it is damaged or nested too deeply."""
    try:
        return json.loads(read_bounded(path, max_bytes=max_bytes))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def new_folder_beside(target: Path) -> Path:
    """A new, empty, hidden folder beside `target`, with a name that nobody else has.

    The name says which process made it, so folders that killed processes of this host left are removed here.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beginning = f".{target.name}.partial-{socket.gethostname()}-"
    for left in target.parent.glob(f"{glob.escape(beginning)}*"):
        if not _is_alive(left.name.removeprefix(beginning).split("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{beginning}{os.getpid()}-", dir=target.parent))
    folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
    return folder


def share_file(path: Path) -> None:
    """Give a file the permissions of any new file; safetensors makes its files private to their owner."""
    path.chmod(0o666 & ~_umask())


def _is_alive(process_id: str) -> bool:
    """Whether a process of this host has this id; True for anything that is no id."""
    return not process_id.isdecimal() or Path("/proc", process_id).exists() or not Path("/proc/self").exists()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
