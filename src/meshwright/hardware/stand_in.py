"""Whose kernels serve a tensor: those of its own device, or of the device a rehearsal stands in for.

A rehearsal follows a step on the CPU with tensors that have no numbers. Its bytes are right only if every
choice between kernels falls as it would on the device that is meant, so each of them asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Hopper: what a rehearsal takes for granted of the device it stands in for.
STAND_IN_CAPABILITY = (9, 0)

_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)


def kernel_device(device_type: str) -> str:
    """The type of device whose kernels are chosen for tensors on a device of this type."""
    return _STANDS_FOR.get() or device_type


def is_stand_in() -> bool:
    """Whether tensors here stand in for those of another device."""
    return _STANDS_FOR.get() is not None


@contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Inside, tensors stand in for tensors of this type of device."""
    token = _STANDS_FOR.set(device_type)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)
