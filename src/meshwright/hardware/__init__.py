"""Devices, clusters and machines, each number with its source. Nothing here imports torch."""

from meshwright.hardware.catalogue import (
    Cluster,
    Device,
    Link,
    cluster_names,
    device_names,
    find_device,
    parse_cluster,
)
from meshwright.hardware.profile import Profile, cluster_of, read_profile

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "Profile",
    "cluster_names",
    "cluster_of",
    "device_names",
    "find_device",
    "parse_cluster",
    "read_profile",
]
