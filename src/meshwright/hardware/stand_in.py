"""Whose kernels serve a tensor: those of its own device, or of the device a rehearsal stands in for.

A rehearsal follows a step on the CPU with tensors that have no numbers. Its bytes are right only if every
choice between kernels falls as it would on the device that is meant, so each of them asks here.
"""

from collections.abc import Generator
from contextlib import contextmanager

# Hopper: what a rehearsal takes for granted of the device it stands in for.
STAND_IN_CAPABILITY = (9, 0)

# Of the process, not of the thread: a backward may choose kernels in a thread of its own.
_stands_for: list[str] = []


def kernel_device(device_type: str) -> str:
    """The type of device whose kernels are chosen for tensors on a device of this type."""
    return _stands_for[-1] if _stands_for else device_type


def is_stand_in() -> bool:
    """Whether tensors here stand in for those of another device."""
    return bool(_stands_for)


@contextmanager
def standing_for(device_type: str) -> Generator[None]:
    """Inside, tensors stand in for tensors of this type of device."""
    _stands_for.append(device_type)
    try:
        yield
    finally:
        _stands_for.pop()
