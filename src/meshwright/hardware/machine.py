"""This machine: the cores, memory and accelerators that a run may use."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Accelerator:
    """One CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability, major and minor."""


@dataclass(frozen=True)
class Machine:
    """The resources that the ranks on a machine share."""

    cores: int
    """Cores that this process may use, by its affinity and its container's quota."""
    free_memory_bytes: int
    has_bf16_units: bool = False
    """Whether the CPU has bf16 matmul instructions (AMX)."""
    accelerators: tuple[Accelerator, ...] = ()


def this_machine(accelerators: tuple[Accelerator, ...] = ()) -> Machine:
    """The resources of this process. The caller lists the accelerators: this module does not import torch."""
    return Machine(
        cores=usable_cores(),
        free_memory_bytes=min(psutil.virtual_memory().available, _free_in_container()),
        has_bf16_units="amx_bf16" in _read(_CPU_FACTS).split(),
        accelerators=accelerators,
    )


def usable_cores() -> int:
    """Number of cores that this process may use, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, cores_of_quota(_read(_CGROUP / "cpu.max"))))


def cores_of_quota(text: str) -> int:
    """Number of full cores in a `cpu.max` line such as `150000 100000`; very many without a quota."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return 1 << 20
    return max(1, int(quota) // int(period))


def _free_in_container() -> int:
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else 1 << 62


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
