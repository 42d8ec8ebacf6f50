"""Python's garbage collector kept out of the steps.

A full collection walks every object of the process, and there are many in one with torch and a compiler in
it; it comes at a moment of its own choosing, another one on every rank, and all the others wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Inside, nothing is collected by itself; what exists already is never looked at again."""
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


def collect_young() -> None:
    """For a moment when the host waits for the device anyway; cheap, because old objects are left alone."""
    gc.collect(1)
