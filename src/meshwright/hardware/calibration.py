"""Time factors of one machine, fitted to its own runs by `plan --calibrate` and kept in its profile.

`compute` multiplies the time of every kernel of the device, `communication` that of every collective.
"""

from dataclasses import dataclass, replace

from meshwright.hardware.catalogue import Cluster, Device, Link


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted time, for kernels and for communication."""

    compute: float = 1.0
    communication: float = 1.0
    num_runs: int = 0
    """Runs that the factors were fitted to."""

    def applied_to(self, cluster: Cluster) -> Cluster:
        """The cluster with its rates divided by the factors."""
        return replace(
            cluster,
            device=_slower_device(cluster.device, self.compute),
            peer=_slower_link(cluster.peer, self.communication),
            network=_slower_link(cluster.network, self.communication),
        )


def _slower_device(device: Device, factor: float) -> Device:
    """The device with every rate of computing divided by the factor; the data sheet's peaks stay."""
    best = {name: device.matmul_ceiling(name) / factor for name in device.peak_flops_per_second}
    copies = device.copy_bytes_per_second
    attention = device.best_attention_flops_per_second
    return replace(
        device,
        best_matmul_flops_per_second=best,
        sustained_share={},
        memory_bytes_per_second=device.memory_bytes_per_second / factor,
        copy_bytes_per_second=None if copies is None else copies / factor,
        best_attention_flops_per_second=None if attention is None else attention / factor,
    )


def _slower_link(link: Link, factor: float) -> Link:
    return replace(
        link,
        bytes_per_second=link.bytes_per_second / factor,
        latency_seconds=link.latency_seconds * factor,
    )
