"""The cores and CPU threads of a rank. Imports no torch.

A rank on a GPU runs on the cores of that GPU's NUMA node; ranks on a CPU are spread over the NUMA nodes. A
rank that its launcher has bound already (srun --cpu-bind, mpirun --bind-to, torchrun --numa-binding) stays
where it is. The threads of a rank are its share of the cores of the host.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from meshwright.hardware.cores import (
    SYSTEM,
    allowed_cores,
    host_cores,
    numa_node_of,
    numa_nodes,
    show_cores,
)
from meshwright.launch.launched import Environment, LaunchedRank
from meshwright.spec.launch import LaunchSpec

THREADS = "OMP_NUM_THREADS"
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Host:
    """The cores of this host, as ranks share them."""

    cores: frozenset[int]
    """Cores that all ranks here share: those of the container."""
    allowed: frozenset[int]
    """Cores that this process may use."""
    nodes: dict[int, frozenset[int]]
    """Cores by NUMA node."""
    gpu_node: int | None = None
    """NUMA node of this rank's GPU; None for a CPU rank, and where it is not known."""


@dataclass(frozen=True)
class CoreChoice:
    """Cores and threads of one rank, and why."""

    cores: frozenset[int] | None
    """Cores to bind the rank to; None leaves it as it is."""
    reason: str
    threads: int | None
    """CPU threads to set; None leaves them as they are."""
    threads_reason: str

    def text(self, host: Host) -> str:
        """One line for people."""
        cores = show_cores(self.cores or host.allowed)
        threads = f"{THREADS}={self.threads} " if self.threads is not None else ""
        why = f"({self.threads_reason})" if threads else self.threads_reason
        return f"rank 0 runs on cores {cores} ({self.reason}), {threads}{why}"


def this_host(pci_address: str | None, *, system: Path = SYSTEM) -> Host:
    """The cores of this host, and the NUMA node of the GPU at an address of the PCI bus."""
    node = numa_node_of(pci_address, system=system) if pci_address else None
    allowed = allowed_cores()
    return Host(host_cores(system=system) or allowed, allowed, numa_nodes(system=system), node)


def choose_cores(
    spec: LaunchSpec, launched: LaunchedRank, host: Host, environment: Environment
) -> CoreChoice:
    """Cores and threads of a rank; nothing is changed yet."""
    cores, reason = _cores(spec, launched, host)
    threads, why = _threads(spec, launched, host, cores or host.allowed, environment)
    return CoreChoice(cores, reason, threads, why)


def _cores(spec: LaunchSpec, launched: LaunchedRank, host: Host) -> tuple[frozenset[int] | None, str]:
    if spec.bind == "none":
        return None, "launch.bind=none"
    if host.allowed < host.cores:
        return None, f"bound by {launched.launcher.name}"
    if len(host.nodes) < 2:
        return None, "one NUMA node"
    node, owner = host.gpu_node, "of its GPU"
    if node is None:
        node, owner = _spread(launched, list(host.nodes)), "by its local rank"
    cores = host.nodes.get(node, frozenset()) & host.allowed
    if not cores:
        return None, f"NUMA node {node} {owner} has no core that this process may use"
    return cores, f"NUMA node {node} {owner}"


def _spread(launched: LaunchedRank, nodes: list[int]) -> int:
    """The NUMA node of a CPU rank: neighbouring ranks share one."""
    return nodes[launched.local_rank * len(nodes) // max(launched.num_local_ranks or 1, len(nodes))]


def _threads(
    spec: LaunchSpec, launched: LaunchedRank, host: Host, cores: frozenset[int], environment: Environment
) -> tuple[int | None, str]:
    """CPU threads of this rank; a value that the launcher or the user has set stays."""
    if spec.threads is not None:
        return spec.threads, "launch.threads"
    text = environment.get(THREADS, "").strip()
    if text:
        is_high = text.isdecimal() and int(text) > len(cores) > 0
        return None, f"{THREADS}={text} as set" + (f", more than its {len(cores)} cores" if is_high else "")
    ranks = launched.num_local_ranks or 1
    share = max(1, min(len(cores), len(host.cores) // ranks))
    return share, f"{len(host.cores)} cores, {ranks} rank{'s' * (ranks > 1)} on this host"


def bind(cores: frozenset[int]) -> None:
    """Bind every thread of this process, and what it starts later, to these cores."""
    threads = [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else [0]
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue  # a thread that has ended meanwhile
