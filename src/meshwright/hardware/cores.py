"""Cores of this host: those of the container, of each NUMA node, and near a PCI device. Reads sysfs only."""

import os
from pathlib import Path

SYSTEM = Path("/sys")
_CGROUPS = Path("/proc/self/cgroup")


def parse_cores(text: str) -> frozenset[int]:
    """Cores of a list as the kernel writes it: `0-3,8` is 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            cores.update(range(int(first), int(last or first) + 1 if (last or first).isdecimal() else 0))
    return frozenset(cores)


def show_cores(cores: frozenset[int]) -> str:
    """`0-3,8`, as the kernel writes it."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def allowed_cores() -> frozenset[int]:
    """Cores that this process may use; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def host_cores(*, system: Path = SYSTEM, cgroups: Path = _CGROUPS) -> frozenset[int]:
    """Cores of the host that this process's container (cgroup) may use, whatever the process itself may."""
    for line in _read(cgroups).splitlines():
        _, controllers, name = line.split(":", 2)
        folder = system / "fs/cgroup" / ("cpuset" if controllers else "") / name.lstrip("/")
        for file in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            found = parse_cores(_read(folder / file)) if controllers in ("", "cpuset") else frozenset[int]()
            if found:
                return found
    return parse_cores(_read(system / "devices/system/cpu/online"))


def numa_nodes(*, system: Path = SYSTEM) -> dict[int, frozenset[int]]:
    """Cores by NUMA node; nodes without cores, such as those of GPU memory, are left out."""
    folders = (system / "devices/system/node").glob("node[0-9]*")
    cores = {int(folder.name[4:]): parse_cores(_read(folder / "cpulist")) for folder in folders}
    return {node: cores[node] for node in sorted(cores) if cores[node]}


def numa_node_of(pci_address: str, *, system: Path = SYSTEM) -> int | None:
    """NUMA node of a PCI device such as `0000:17:00.0`; None where the kernel does not know it."""
    text = _read(system / "bus/pci/devices" / pci_address.lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
