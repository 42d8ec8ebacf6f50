"""The device that a rehearsal simulates with CPU tensors that have no data.

A rehearsal traces a step on the CPU. Its bytes are right only if every choice between kernels falls as on the
simulated device. So every module, function and optimizer that makes such a choice is given a
`SimulatedDevice | None` when it is built; None means that kernels are those of the tensors' own device.
"""

from typing import NamedTuple


class SimulatedDevice(NamedTuple):
    """Type and CUDA compute capability of a device that is not here."""

    type: str
    capability: tuple[int, int]


HOPPER = SimulatedDevice("cuda", (9, 0))


def kernel_device(device_type: str, simulated: SimulatedDevice | None) -> str:
    """Type of the device whose kernels serve tensors on a device of type `device_type`."""
    return device_type if simulated is None else simulated.type
