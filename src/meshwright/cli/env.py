"""`meshwright env`: versions and hardware of this machine, for a bug report. It never prints secrets."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from typing import Any

import typer

from meshwright.cli.check import AsJson

PACKAGES = (
    "meshwright",
    "torch",
    "numpy",
    "pydantic",
    "PyYAML",
    "typer",
    "rich",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "transformers",
    "triton",
)
# The only environment variables that are read: others may hold secrets.
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_CPUS_PER_TASK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "PMIX_RANK",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_RDZV_ENDPOINT",
    "SM_HOSTS",
    "SM_CURRENT_HOST",
    "SM_NUM_GPUS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_HOSTID",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_HIGH_PRIORITY",
)
# Variables that are secret: only that they are set is shown.
SECRET_VARIABLES = ("MESHWRIGHT_RUN_SECRET",)
PROGRAMS = ("sbatch", "srun", "mpirun", "mpiexec", "torchrun", "kubectl", "docker", "apptainer", "enroot")


def env(as_json: AsJson = False) -> None:
    """Print versions, cores, memory, accelerators, links, and who would start the ranks.

    Works without torch, whose facts are then left out. Only variables of launchers and of NCCL and gloo are
    read, addresses of the machine are not, and the home folder is shown as ~: the output can go into a bug
    report as it is.
    """
    facts = environment()
    typer.echo(json.dumps(facts, indent=2) if as_json else _as_text(facts))


def environment() -> dict[str, Any]:
    """The facts that `env` prints, as plain values."""
    return {
        "versions": {"python": platform.python_version(), **_package_versions()},
        "machine": _machine(),
        "accelerators": _accelerators(),
        "links": _links(),
        "launcher": _launcher_variables(),
        "launched": _launched(),
        "programs": [name for name in PROGRAMS if shutil.which(name) is not None],
    }


def _launcher_variables() -> dict[str, str]:
    found = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
    return found | {name: "(set)" for name in SECRET_VARIABLES if name in os.environ}


def _launched() -> str:
    """Who started this process as a rank or a node, or what is wrong with the variables."""
    from meshwright.errors import LaunchError
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.launched_node import launched_node
    from meshwright.launch.meeting import StoreAddress, find_meeting

    try:
        node, rank = launched_node(), launched_rank()
        if node is not None:
            return (
                f"node {node.node} of {node.num_nodes} by {node.platform}, rank 0 at {node.host}:{node.port}"
            )
        if rank is None:
            return "by nobody: `train` starts the ranks here"
        text = f"rank {rank.rank} of {rank.num_ranks}, local rank {rank.local_rank} by {rank.launcher.name}"
        meeting = find_meeting(rank)
        return (
            f"{text}, rank 0 at {meeting.host}:{meeting.port}" if isinstance(meeting, StoreAddress) else text
        )
    except LaunchError as error:
        return f"cannot be told: {error.fact}"


def _links() -> dict[str, Any]:
    """NUMA nodes, network interfaces, InfiniBand ports and the libraries that use them."""
    from meshwright.hardware.cores import numa_nodes, show_cores
    from meshwright.hardware.links import infiniband_ports, network_interfaces

    return {
        "numa_nodes": {str(node): show_cores(cores) for node, cores in numa_nodes().items()},
        "interfaces": network_interfaces(),
        "infiniband": infiniband_ports(),
        **_libraries(),
    }


def _libraries() -> dict[str, str]:
    """NCCL's version, and whether torch has gloo, whose version is that of torch; empty without torch."""
    try:
        import torch
        from torch import distributed
        from torch.cuda import nccl as nccl_library
    except ModuleNotFoundError:
        return {}
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    nccl = ".".join(map(str, nccl_library.version())) if has_nccl else "none"
    return {"nccl": nccl, "gloo": f"of torch {torch.__version__}" if has_gloo else "none"}


def _package_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _machine() -> dict[str, Any]:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": psutil.virtual_memory().total,
        "free_memory_bytes": psutil.virtual_memory().available,
        "executable": sys.executable.replace(os.path.expanduser("~"), "~", 1),
    }


def _accelerators() -> list[dict[str, Any]] | None:
    """The CUDA devices; None without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "capability": f"{device.major}.{device.minor}",
        }
        for device in found
    ]


def _as_text(facts: dict[str, Any]) -> str:
    from meshwright.units import show_bytes

    machine = facts["machine"]
    free, total = show_bytes(machine["free_memory_bytes"]), show_bytes(machine["memory_bytes"])
    lines = [f"{name:<12} {version}" for name, version in facts["versions"].items()]
    lines += [
        "",
        f"{'system':<12} {machine['system']}",
        f"{'cores':<12} {machine['usable_cores']} usable of {machine['cores']}",
        f"{'memory':<12} {free} free of {total}",
        f"{'accelerator':<12} {_accelerator_text(facts['accelerators'])}",
    ]
    lines += ["", *_link_lines(facts["links"])]
    lines += ["", f"{'launched':<12} {facts['launched']}", f"{'programs':<12} {', '.join(facts['programs'])}"]
    if facts["launcher"]:
        lines += ["", *(f"{name}={value}" for name, value in facts["launcher"].items())]
    return "\n".join(lines)


def _link_lines(links: dict[str, Any]) -> list[str]:
    nodes = [f"{node}: cores {cores}" for node, cores in links["numa_nodes"].items()]
    ports = [f"{one['hca']} port {one['port']} {one['rate']} {one['state']}" for one in links["infiniband"]]
    interfaces = [
        f"{one['name']} {one['state']}"
        + (f" {one['gigabits_per_second']:g} Gb/s" if one["gigabits_per_second"] else "")
        for one in links["interfaces"]
    ]
    found = {"NUMA nodes": nodes, "interfaces": interfaces, "InfiniBand": ports}
    lines = [f"{name:<12} {', '.join(texts) or 'none'}" for name, texts in found.items()]
    return lines + [f"{name.upper():<12} {links[name]}" for name in ("nccl", "gloo") if name in links]


def _accelerator_text(accelerators: list[dict[str, Any]] | None) -> str:
    from meshwright.units import show_bytes

    if accelerators is None:
        return 'unknown without torch (pip install "meshwright[train]")'
    devices = [f"{each['name']}, {show_bytes(each['memory_bytes'])}" for each in accelerators]
    return f"\n{'':<13}".join(devices) or "none"
