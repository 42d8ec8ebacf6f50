"""Bytes that offload has moved and holds on one rank, counted where the copies are made."""

from dataclasses import dataclass


@dataclass
class OffloadCounters:
    """Bytes of one rank; transfers add up over the run."""

    sent_bytes: int = 0
    """Bytes copied from the device to the host."""
    fetched_bytes: int = 0
    """Bytes copied from the host to the device."""
    host_bytes: int = 0
    """Bytes of host buffers in use now."""
    peak_host_bytes: int = 0
    pool_bytes: int = 0
    """Bytes of all host buffers, in use or free for reuse."""
    device_bytes: int = 0
    """Bytes of device copies of offloaded tensors now."""
    peak_device_bytes: int = 0

    def add_host_bytes(self, num_bytes: int) -> None:
        """Count more (or, negative, fewer) bytes of host buffers in use."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def add_device_bytes(self, num_bytes: int) -> None:
        """Count more (or, negative, fewer) bytes of device copies."""
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
