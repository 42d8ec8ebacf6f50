"""Where the ranks of a launcher find each other: a file on one machine, or an address. Imports no torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch.launched import OPEN_MPI, SLURM, Environment, LaunchedRank
from meshwright.launch.launched_node import WORLD_NUMBER

STORE_FILE = "MESHWRIGHT_STORE_FILE"
"""The variable that names the file in which local ranks find each other."""
_LOOPBACK = "127.0.0.1"
# Ports of jobs that name none: below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


@dataclass(frozen=True)
class StoreFile:
    """Local ranks meet in a file: no port, which others could take or write to."""

    path: Path


@dataclass(frozen=True)
class StoreAddress:
    """Ranks meet at an address at which rank 0, or torchrun's agent, listens."""

    host: str
    port: int
    is_hosted_by_agent: bool
    """Whether torchrun itself listens there, so that every rank connects."""
    attempt: str
    """Which start of the ranks this is, where torchrun restarts them on one host; else the number of the
    world, where nodes come and go."""
    origin: str
    """The variables that name the address."""


Meeting = StoreFile | StoreAddress


def find_meeting(launched: LaunchedRank, environment: Environment = os.environ) -> Meeting:
    """Where this rank meets the others; LaunchError where nothing says so."""
    if STORE_FILE in environment:
        return StoreFile(Path(environment[STORE_FILE]))
    host, host_origin = _host(launched, environment)
    port, port_origin = _port(launched, environment)
    is_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if launched.is_one_host else "0"
    attempt = environment.get(WORLD_NUMBER, restarts)
    return StoreAddress(host, port, is_agent, attempt, f"{host_origin} and {port_origin}")


def _host(launched: LaunchedRank, environment: Environment) -> tuple[str, str]:
    """The host of rank 0 and where that is written."""
    host = environment.get("MASTER_ADDR", "").strip()
    if host:
        return host, f"MASTER_ADDR={host}"
    if launched.is_one_host:
        return _LOOPBACK, "all ranks on this host"
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if launched.launcher is SLURM and names:
        return first_host(names), f"SLURM_STEP_NODELIST={names}"
    raise LaunchError(
        f"{launched.num_ranks} ranks were started, and MASTER_ADDR is not set",
        where="environment",
        hint="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there" + _how(launched),
    )


def _port(launched: LaunchedRank, environment: Environment) -> tuple[int, str]:
    """The port of rank 0 and where that is written."""
    text = environment.get("MASTER_PORT", "").strip()
    if text:
        return _parse_port(text), f"MASTER_PORT={text}"
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    if launched.launcher is SLURM and job.isdecimal() and step.isdecimal():
        # Successive steps of a job, and successive jobs, have different ports.
        port = _FIRST_PORT + (31 * int(job) + int(step)) % _NUM_PORTS
        return port, f"SLURM_JOB_ID={job} and SLURM_STEP_ID={step}, which mean port {port}"
    raise LaunchError(
        f"{launched.num_ranks} ranks were started, and MASTER_PORT is not set",
        where="environment",
        hint="set MASTER_PORT to a port that is free on the host of rank 0" + _how(launched),
    )


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) < 2**16):
        raise LaunchError(
            f"MASTER_PORT={text!r} is not a port", where="environment", hint="use a number from 1 to 65535"
        )
    return int(text)


def _how(launched: LaunchedRank) -> str:
    is_mpi = launched.launcher is OPEN_MPI
    return ": mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..." if is_mpi else ""


def first_host(names: str) -> str:
    """The first host of SLURM's list: `n001` of `n[001-004,9],m1`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", names)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else names)
