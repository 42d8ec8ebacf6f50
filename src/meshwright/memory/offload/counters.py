"""What offload has moved and holds on one rank, counted where the copies are made."""

from dataclasses import dataclass


@dataclass
class Account:
    """Bytes of one rank; transfers add up over the life of the run."""

    sent_bytes: int = 0
    """From the device to the host."""
    fetched_bytes: int = 0
    """From the host to the device."""
    host_bytes: int = 0
    """Host buffers in use at the moment."""
    peak_host_bytes: int = 0
    pool_bytes: int = 0
    """All host buffers, in use or waiting to be used again."""
    device_bytes: int = 0
    """Copies on the device of what lives on the host, at the moment."""
    peak_device_bytes: int = 0

    def hold_on_host(self, num_bytes: int) -> None:
        """More (or, negative, fewer) bytes of host buffers are in use."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def hold_on_device(self, num_bytes: int) -> None:
        """More (or, negative, fewer) bytes of copies are on the device."""
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
