"""Two nodes on this machine, in network namespaces (node_lab.sh): who may use them, and what they need."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NODE_LAB = Path(__file__).with_name("node_lab.sh")
SLURM_LAB = Path(__file__).with_name("slurm_lab.sh")
_SYSTEM_PATH = ":/usr/sbin:/sbin"


def lacking(programs: Sequence[str]) -> str:
    """Why there can be no nodes here; empty where there can."""
    if os.geteuid() != 0:
        return "not root"
    path = os.environ["PATH"] + _SYSTEM_PATH
    missing = [name for name in (*programs, "ip", "nsenter") if shutil.which(name, path=path) is None]
    return f"{', '.join(missing)} not installed (.ci/install_launchers)" if missing else ""


@contextmanager
def nodes_alone() -> Iterator[None]:
    """While inside, no other test on this machine has the nodes; the environment is restored at the end."""
    before = dict(os.environ)
    with (Path(tempfile.gettempdir()) / "meshwright-nodes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ["PATH"] += _SYSTEM_PATH
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
