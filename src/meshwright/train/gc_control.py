"""Python's garbage collector runs between steps only.

A full collection walks every object of the process, and a process with torch and a compiler has many. It
would start at another time on every rank, and each time all other ranks would wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turns automatic collection off inside; objects that exist already are frozen and not walked again."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage() -> None:
    """Collect young objects, when the host has just waited for the device; cheap, as old ones are frozen."""
    gc.collect(1)
