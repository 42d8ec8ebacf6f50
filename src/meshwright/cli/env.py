"""`meshwright env`: versions and hardware of this machine, for a bug report. It never prints secrets."""

import importlib.metadata
import json
import os
import platform
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
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_HOSTID",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def env(as_json: AsJson = False) -> None:
    """Print versions, cores, memory, accelerators and launcher variables of this machine.

    Works without torch, whose facts are then left out. No other environment variables are read, so the
    output can go into a bug report as it is.
    """
    facts = environment()
    typer.echo(json.dumps(facts, indent=2) if as_json else _as_text(facts))


def environment() -> dict[str, Any]:
    """The facts that `env` prints, as plain values."""
    return {
        "versions": {"python": platform.python_version(), **_package_versions()},
        "machine": _machine(),
        "accelerators": _accelerators(),
        "launcher": {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ},
    }


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
        "executable": sys.executable,
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
    if facts["launcher"]:
        lines += ["", *(f"{name}={value}" for name, value in facts["launcher"].items())]
    return "\n".join(lines)


def _accelerator_text(accelerators: list[dict[str, Any]] | None) -> str:
    from meshwright.units import show_bytes

    if accelerators is None:
        return 'unknown without torch (pip install "meshwright[train]")'
    devices = [f"{each['name']}, {show_bytes(each['memory_bytes'])}" for each in accelerators]
    return f"\n{'':<13}".join(devices) or "none"
