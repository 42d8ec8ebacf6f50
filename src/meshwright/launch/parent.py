"""No orphans: a rank ends when the process that started it has ended, even by SIGKILL. Imports no torch."""

import ctypes
import os
import signal
import sys
import threading

from meshwright.launch.launched import launched_rank

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_EXIT_ORPHANED = 4
_THREAD = "parent"


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends. Called once, early, by a rank.

    Linux kills at once, whatever this process is doing. A thread that looks once a second is there for other
    systems, and for a parent that is gone already.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name=_THREAD, daemon=True).start()


def end_with_launcher() -> None:
    """The same for a script that a launcher such as torchrun started; only the first call has an effect."""
    is_watched = any(thread.name == _THREAD for thread in threading.enumerate())
    if launched_rank() is not None and not is_watched:
        end_with_parent()


def _watch(parent: int) -> None:
    is_over = threading.Event()
    while os.getppid() == parent:
        is_over.wait(_POLL_SECONDS)
    os._exit(_EXIT_ORPHANED)
