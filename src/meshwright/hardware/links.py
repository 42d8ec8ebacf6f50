"""Links of this host as sysfs shows them: network interfaces and InfiniBand ports. No addresses are read."""

from pathlib import Path
from typing import Any

from meshwright.hardware.cores import SYSTEM


def network_interfaces(*, system: Path = SYSTEM) -> list[dict[str, Any]]:
    """Name, state and speed in Gb/s of each interface but loopback; speed is None where it is not known."""
    folders = sorted((system / "class/net").glob("*"))
    return [
        {"name": one.name, "state": _read(one / "operstate"), "gigabits_per_second": _gigabits(one / "speed")}
        for one in folders
        if one.is_dir() and one.name != "lo"
    ]


def _gigabits(path: Path) -> float | None:
    text = _read(path)
    return int(text) / 1000 if text.isdecimal() else None


def infiniband_ports(*, system: Path = SYSTEM) -> list[dict[str, Any]]:
    """Adapter (HCA), port, state and rate of each InfiniBand or RoCE port, and the adapter's NUMA node."""
    ports = sorted((system / "class/infiniband").glob("*/ports/*"))
    return [
        {
            "hca": port.parents[1].name,
            "port": port.name,
            "state": _read(port / "state").partition(": ")[2],
            "rate": _read(port / "rate"),
            "numa_node": _read(port.parents[1] / "device/numa_node"),
        }
        for port in ports
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
