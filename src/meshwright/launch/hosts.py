"""Hosts of a job: hostfiles of mpirun and DeepSpeed, and lists on the command line."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError, read_trouble
from meshwright.launch.job import Job

_LINE = re.compile(
    r"^(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots=(?P<slots>[0-9]+)|:(?P<colon>[0-9]+))?\s*$"
)
_SSH_PORT = 22
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Host:
    """A host and the ranks that it can take; None where the file does not say."""

    name: str
    slots: int | None = None


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a hostfile: `host slots=4`, `host:4` or `host` on each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the hostfile cannot be read: {read_trouble(error)}", where=str(path)) from None
    hosts = [
        _parsed(line.partition("#")[0].strip(), f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.partition("#")[0].strip()
    ]
    if not hosts:
        raise LaunchError(
            "the hostfile names no host", where=str(path), hint="one line per host: node1 slots=4"
        )
    return _distinct(hosts, str(path))


def parse_hosts(text: str) -> list[Host]:
    """The hosts of a list such as `node1,node2`."""
    return _distinct([_parsed(word.strip(), "--hosts") for word in text.split(",")], "--hosts")


def _parsed(line: str, where: str) -> Host:
    match = _LINE.match(line)
    if match is None:
        raise LaunchError(f"{line!r} is not a host", where=where, hint="one line per host: node1 slots=4")
    slots = match["slots"] or match["colon"]
    return Host(match["host"], int(slots) if slots else None)


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise LaunchError(f"host {name} is named twice", where=where, hint="give its ranks with slots=N")
    return hosts


def hosts_of(job: Job, hosts: list[Host], where: str) -> list[str]:
    """The hosts that the job uses; LaunchError for too few hosts, or too few slots on one."""
    if not hosts:
        return [f"node{index + 1}" for index in range(job.num_nodes)]
    if len(hosts) < job.num_nodes:
        raise LaunchError(
            f"the run needs {job.num_nodes} nodes, and {len(hosts)} hosts are named",
            where=where,
            hint=f"name {job.num_nodes} hosts, or choose another mesh",
        )
    used = hosts[: job.num_nodes]
    for host in used:
        if host.slots is not None and host.slots < job.ranks_per_node:
            fact = f"{host.name} has {host.slots} slots, and each node takes {job.ranks_per_node} ranks"
            raise LaunchError(fact, where=where, hint="give it more slots, or use more nodes (--nodes)")
    return [host.name for host in used]


def hostfile_text(job: Job, hosts: list[str]) -> str:
    """A hostfile, as mpirun and DeepSpeed read it."""
    return "".join(f"{host} slots={job.ranks_per_node}\n" for host in hosts)


def require_alive(hosts: list[str], *, port: int = _SSH_PORT) -> None:
    """LaunchError for the first host that does not answer on its ssh port."""
    for host in hosts:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise LaunchError(
                f"host {host} does not answer on port {port}: {error.strerror or error}",
                where="--check-hosts",
                hint="remove it from the list, or start it",
            ) from None
