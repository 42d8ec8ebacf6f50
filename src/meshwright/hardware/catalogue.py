"""Devices and clusters by name, as in `--on h100:8x16`, `--on leonardo:16` or `--on mine.toml`.

The numbers are in devices.toml and clusters.toml, each with its source. A user file has the same two tables,
`[devices.NAME]` and `[clusters.NAME]`, which extend or replace the built-in ones.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.errors import SpecError, read_trouble
from meshwright.files import read_text
from meshwright.hardware.other_accelerators import refuse_other_accelerator
from meshwright.hardware.table_values import Table, check_positive, read_rates, read_value, refuse_unknown
from meshwright.hardware.unknown_cluster import unknown_cluster

# Network of a cluster that is given by its device alone: one adapter of the device's generation per device.
_GEFORCE = (
    *("rtx3060", "rtx3080", "rtx3090", "rtx4060", "rtx4060ti", "rtx4070", "rtx4080", "rtx4090"),
    *("rtx5060ti", "rtx5070", "rtx5070ti", "rtx5080", "rtx5090"),
)
GENERIC_NETWORK_BYTES_PER_SECOND = {
    "cpu": 1.25e9,
    **dict.fromkeys(("p100", "v100", "a6000", "a10", "l4", "t4", *_GEFORCE), 12.5e9),
    **dict.fromkeys(("a100-40gb", "a100-64gb", "a100-80gb", "l40s", "rtxpro6000"), 25e9),
    "gh200": 50e9,
}
GENERIC_NETWORK_SOURCE = (
    "assumed: one adapter per device, 400 Gb/s from Hopper on, 200 Gb/s for Ampere, "
    "100 Gb/s for older devices, workstation cards and inference cards"
)
NETWORK_LATENCY_SECONDS = 12e-6
PEER_LATENCY_SECONDS = 4e-6
HOST_MEMORY_BYTES_PER_DEVICE = 128 * 2**30
_ON = re.compile(r"^(?P<name>.+?)(?::(?P<a>\d+)(?:x(?P<b>\d+))?)?$")


@dataclass(frozen=True)
class Link:
    """A connection of one device: latency of a hop, and bytes per second in one direction."""

    name: str
    bytes_per_second: float
    latency_seconds: float
    efficiency: float | None = None
    """Share of the rate that large collectives reach; None is the usual share of a data-sheet figure."""


@dataclass(frozen=True)
class Device:
    """One accelerator; rates are dense data-sheet figures, memory is the part that a program can allocate."""

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    num_sms: int
    peak_flops_per_second: Mapping[str, float]
    best_matmul_flops_per_second: Mapping[str, float]
    peer: Link
    host: Link
    devices_per_node: int
    sustained_share: Mapping[str, float] = field(default_factory=dict[str, float])
    """Matmul rate over minutes of training (at sustained clocks) over the best measured; 1 if not given."""
    aliases: tuple[str, ...] = ()
    copy_bytes_per_second: float | None = None
    """Measured memory bandwidth, where a profile has it."""
    best_attention_flops_per_second: float | None = None
    """Measured rate of the best causal attention kernel, where a profile has it."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s in this precision; the error for a precision that it lacks lists those it has."""
        if precision in self.peak_flops_per_second:
            return self.peak_flops_per_second[precision]
        others = [name for name in ("bf16", "fp16", "tf32", "fp32") if name in self.peak_flops_per_second]
        hint = f"use precision.compute={' or '.join(others)}"
        if precision in ("fp8", "fp4"):
            hint = "leave precision.fp8 and adapter.base=fp8 out, or use a device that has fp8"
        raise SpecError(f"{self.title} has no {precision} rate", where="precision", hint=hint)

    def matmul_ceiling(self, precision: str) -> float:
        """Sustained FLOP/s of large matmuls, from the best measured rate or 80% of the data sheet."""
        best = self.best_matmul_flops_per_second.get(precision, 0.8 * self.peak(precision))
        return best * self.sustained_share.get(precision, 1.0)


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices: `peer` connects the devices of one node, `network` the nodes (a link per device)."""

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    peer: Link
    network: Link
    host: Link
    host_memory_bytes: int
    max_nodes: int | None = None
    storage_bytes_per_second: float | None = None
    """Rate at which all nodes together write checkpoints; None where it is not known."""
    device_hours_per_failure: float | None = None
    """Device-hours between two failures that interrupt a run; None where it is not known."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self.num_nodes * self.devices_per_node

    def with_devices(self, num_devices: int) -> "Cluster":
        """The same kind of cluster with this many devices, spread evenly over as few nodes as possible."""
        nodes = -(-num_devices // self.devices_per_node)
        if num_devices % nodes:
            raise SpecError(
                f"{num_devices} devices cannot be spread evenly over nodes of {self.devices_per_node}",
                where="--on",
                hint=f"use a multiple of {self.devices_per_node}",
            )
        return self.of_size(num_nodes=nodes, devices_per_node=num_devices // nodes)

    def of_size(self, *, num_nodes: int, devices_per_node: int) -> "Cluster":
        """The cluster with other nodes; host memory that is assumed follows their devices."""
        is_known = "host_memory_bytes" in self.sources
        host = self.host_memory_bytes if is_known else devices_per_node * HOST_MEMORY_BYTES_PER_DEVICE
        return replace(self, num_nodes=num_nodes, devices_per_node=devices_per_node, host_memory_bytes=host)


def device_from_table(name: str, table: Table) -> Device:
    """A device from its TOML table; the error names a missing or invalid number."""
    sources: dict[str, str] = {}
    where = f"devices.{name}"
    known = {"title", "aliases", "devices_per_node", "memory_bytes", "memory_bytes_per_second", "num_sms"}
    known |= {"peak_flops_per_second", "best_matmul_flops_per_second", "sustained_share", "links"}
    refuse_unknown(table, known, where)
    links = read_rates(table, "links", where, sources)
    plain = {
        key: read_value(table, key, where, sources)
        for key in ("memory_bytes", "memory_bytes_per_second", "num_sms")
    }
    peaks = read_rates(table, "peak_flops_per_second", where, sources)
    if not peaks or "peer" not in links or "host" not in links:
        raise SpecError("a device needs peak_flops_per_second, links.peer and links.host", where=where)
    check_positive({**plain, **links, **peaks}, where)
    host_name = "c2c" if "C2C" in sources["links.host"] else "pcie"
    return Device(
        name=name,
        title=str(table.get("title", name)),
        memory_bytes=int(plain["memory_bytes"]),
        memory_bytes_per_second=plain["memory_bytes_per_second"],
        num_sms=int(plain["num_sms"]),
        peak_flops_per_second=peaks,
        best_matmul_flops_per_second=read_rates(table, "best_matmul_flops_per_second", where, sources),
        sustained_share=read_rates(table, "sustained_share", where, sources),
        peer=Link("peer", links["peer"], PEER_LATENCY_SECONDS),
        host=Link(host_name, links["host"], PEER_LATENCY_SECONDS),
        devices_per_node=int(table.get("devices_per_node", 8)),
        aliases=tuple(str(alias) for alias in table.get("aliases", ())),
        sources=sources,
    )


def cluster_from_table(name: str, table: Table, devices: Mapping[str, Device]) -> Cluster:
    """A cluster of one node from its TOML table; `parse_cluster` sets the number of nodes."""
    sources: dict[str, str] = {}
    where = f"clusters.{name}"
    known = {"title", "device", "devices_per_node", "max_nodes", "host_memory_bytes"}
    known |= {"network_bytes_per_second", "network_latency_seconds", "network_efficiency"}
    known |= {"peer_bytes_per_second", "storage_bytes_per_second", "device_hours_per_failure"}
    refuse_unknown(table, known, where)
    device = find_device(str(table.get("device", "")), devices=devices)
    network = read_value(table, "network_bytes_per_second", where, sources)
    latency = (
        read_value(table, "network_latency_seconds", where, sources)
        if "network_latency_seconds" in table
        else NETWORK_LATENCY_SECONDS
    )
    efficiency = None
    if "network_efficiency" in table:
        efficiency = min(read_value(table, "network_efficiency", where, sources), 1.0)
    per_node = int(table.get("devices_per_node", device.devices_per_node))
    peer = device.peer
    if "peer_bytes_per_second" in table:
        peer = replace(peer, bytes_per_second=read_value(table, "peer_bytes_per_second", where, sources))
    optional = ("storage_bytes_per_second", "device_hours_per_failure")
    known_rates = {name: read_value(table, name, where, sources) for name in optional if name in table}
    numbers = {"network_bytes_per_second": network, "devices_per_node": per_node}
    check_positive(numbers | {"peer_bytes_per_second": peer.bytes_per_second}, where)
    check_positive(known_rates, where)
    memory = read_value(table, "host_memory_bytes", where, sources) if "host_memory_bytes" in table else 0.0
    return Cluster(
        name=name,
        device=device,
        num_nodes=1,
        devices_per_node=per_node,
        peer=peer,
        network=Link("network", network, latency, efficiency),
        host=device.host,
        host_memory_bytes=int(memory) or per_node * HOST_MEMORY_BYTES_PER_DEVICE,
        max_nodes=int(read_value(table, "max_nodes", where, sources)) if "max_nodes" in table else None,
        storage_bytes_per_second=known_rates.get("storage_bytes_per_second"),
        device_hours_per_failure=known_rates.get("device_hours_per_failure"),
        sources=sources,
    )


def generic_cluster(device: Device) -> Cluster:
    """One node of this device, with the usual network of its generation."""
    network = GENERIC_NETWORK_BYTES_PER_SECOND.get(device.name, 50e9)
    return Cluster(
        name=device.name,
        device=device,
        num_nodes=1,
        devices_per_node=device.devices_per_node,
        peer=device.peer,
        network=Link("network", network, NETWORK_LATENCY_SECONDS),
        host=device.host,
        host_memory_bytes=device.devices_per_node * HOST_MEMORY_BYTES_PER_DEVICE,
        sources={"network_bytes_per_second": GENERIC_NETWORK_SOURCE},
    )


def _built_in(file: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("meshwright.hardware").joinpath(file).read_text(encoding="utf-8"))


@cache
def built_in_devices() -> Mapping[str, Device]:
    """The devices of devices.toml by name."""
    return {name: device_from_table(name, table) for name, table in _built_in("devices.toml").items()}


@cache
def built_in_clusters() -> Mapping[str, Cluster]:
    """The clusters of clusters.toml by name, with one node each."""
    devices = built_in_devices()
    return {
        name: cluster_from_table(name, table, devices) for name, table in _built_in("clusters.toml").items()
    }


def device_names() -> list[str]:
    """Names of the built-in devices."""
    return list(built_in_devices())


def cluster_names() -> list[str]:
    """Names of the built-in clusters."""
    return list(built_in_clusters())


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", " ", name.strip().lower().removeprefix("nvidia ").removeprefix("amd "))


def find_device(name: str, *, devices: Mapping[str, Device] | None = None) -> Device:
    """The device of this name or alias, in any case; the error for an unknown one suggests the nearest."""
    known = devices or built_in_devices()
    index = {_plain(alias): device for device in known.values() for alias in (device.name, *device.aliases)}
    wanted = _plain(name)
    if wanted in index:
        return index[wanted]
    near = difflib.get_close_matches(wanted, index, n=1, cutoff=0.5)
    hint = f"did you mean {index[near[0]].name!r}? " if near else ""
    raise SpecError(f"unknown device {name!r}", where="--on", hint=f"{hint}known: {', '.join(known)}")


def parse_cluster(text: str) -> Cluster:
    """The cluster of `dgx-h100:4`, `leonardo:16`, `h100:8x16` (16 nodes of 8), `h100:64` or a TOML file."""
    path, _, nodes = text.partition(".toml")
    if text.endswith(".toml") or ".toml:" in text:
        return _from_file(Path(f"{path}.toml"), nodes.removeprefix(":"))
    match = _ON.match(text.strip())
    if match is None or not text.strip():
        raise SpecError(
            f"{text!r} names no cluster", where="--on", hint="for example h100:8x16 or leonardo:16"
        )
    name, first, second = match.group("name"), match.group("a"), match.group("b")
    refuse_other_accelerator(_plain(name))
    named = built_in_clusters().get(_plain(name))
    if named is not None:
        return _sized_cluster(named, first, second)
    try:
        device = find_device(name)
    except SpecError:
        raise unknown_cluster(name, clusters=cluster_names(), devices=device_names()) from None
    return _sized_device(device, first, second)


def _sized_cluster(cluster: Cluster, first: str | None, second: str | None) -> Cluster:
    """`leonardo:16` has 16 nodes; `leonardo:4x16` has 16 nodes of which 4 devices are used."""
    nodes = int(second or first or 1)
    if second and int(first or 0) > cluster.devices_per_node:
        raise SpecError(
            f"{cluster.name} has {cluster.devices_per_node} devices per node, not {first}",
            where="--on",
            hint=f"write {cluster.name}:{nodes}",
        )
    if nodes < 1 or (cluster.max_nodes is not None and nodes > cluster.max_nodes):
        raise SpecError(
            f"{nodes} nodes of {cluster.name}", where="--on", hint=f"1 to {cluster.max_nodes} nodes"
        )
    per_node = int(first) if second and first else cluster.devices_per_node
    return cluster.of_size(num_nodes=nodes, devices_per_node=_at_least_one(per_node))


def _at_least_one(count: int) -> int:
    if not 1 <= count <= 1_000_000:
        raise SpecError(f"{count} devices", where="--on", hint="between 1 and 1,000,000")
    return count


def _sized_device(device: Device, first: str | None, second: str | None) -> Cluster:
    cluster = generic_cluster(device)
    if first is None:
        return replace(cluster, num_nodes=1)
    if second is None:
        return cluster.with_devices(_at_least_one(int(first)))
    return cluster.of_size(devices_per_node=_at_least_one(int(first)), num_nodes=_at_least_one(int(second)))


def _from_file(path: Path, nodes: str) -> Cluster:
    try:
        content = tomllib.loads(read_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(
            f"cannot read {path}: {read_trouble(error)}",
            where="--on",
            hint="a TOML file with [clusters.NAME]",
        ) from error
    refuse_unknown(content, {"devices", "clusters"}, str(path))
    devices = dict(built_in_devices())
    for name, table in content.get("devices", {}).items():
        devices[name] = device_from_table(name, table)
    clusters = {
        name: cluster_from_table(name, table, devices) for name, table in content.get("clusters", {}).items()
    }
    if len(clusters) != 1:
        raise SpecError(
            f"{path} describes {len(clusters)} clusters", where="--on", hint="exactly one [clusters.NAME]"
        )
    first, _, second = nodes.partition("x")
    if nodes and not (first.isdigit() and (not second or second.isdigit())):
        raise SpecError(f"{nodes!r} is not a number of nodes", where="--on", hint=f"for example {path}:4")
    return _sized_cluster(next(iter(clusters.values())), first or None, second or None)
