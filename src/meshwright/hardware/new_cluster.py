"""The answers of `hardware new` as a cluster file in TOML, which `--on FILE` reads."""

import json
import re
from dataclasses import dataclass

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import HOST_MEMORY_BYTES_PER_DEVICE, Device, find_device, generic_cluster
from meshwright.units import parse_bytes, show_bytes

_NODE = re.compile(
    r"^\s*(?:(?P<count>\d+)\s*(?:x|\*|of)?\s+|(?P<tight>\d+)x)?(?P<device>\S.*?)\s*$", re.IGNORECASE
)
_RATE = re.compile(
    r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[tgm]?(?:bit|b)(?:/s|ps)|[tgm]?bytes?/s)?"
    r"(?:\s*(?:per|a|/)\s*(?P<per>node|device|gpu|card))?\s*$",
    re.IGNORECASE,
)
_SCALE = {"t": 1e12, "g": 1e9, "m": 1e6}
NAME = re.compile(r"^[a-z0-9][a-z0-9_-]*$")
MAX_DEVICES_PER_NODE = 1024


@dataclass(frozen=True)
class Rate:
    """Bytes per second in one direction, with the text that the user gave."""

    bytes_per_second: float
    text: str
    per: str | None = None
    """`node` or `device`, where the text said so."""


@dataclass(frozen=True)
class NewCluster:
    """A node and its network, as the user described them; None where the catalogue's value is taken."""

    device: Device
    devices_per_node: int
    peer: Rate | None = None
    network: Rate | None = None
    host_memory_bytes: int | None = None
    storage: Rate | None = None

    @property
    def network_bytes_per_device(self) -> float:
        """Network of one device in one direction; a rate per node is divided by its devices."""
        if self.network is None:
            return generic_cluster(self.device).network.bytes_per_second
        shared = self.devices_per_node if self.network.per == "node" else 1
        return self.network.bytes_per_second / shared


def parse_node(text: str) -> tuple[int | None, Device]:
    """`8 x h100` -> (8, H100); `h100` -> (None, H100)."""
    match = _NODE.match(text)
    if match is None:
        raise SpecError(f"{text!r} names no device", where="--node", hint="for example '8 x h100'")
    count = match.group("count") or match.group("tight")
    if count is not None and not 1 <= int(count) <= MAX_DEVICES_PER_NODE:
        raise SpecError(f"{count} devices in a node", where="--node", hint=f"1 to {MAX_DEVICES_PER_NODE}")
    try:
        device = find_device(match.group("device"))
    except SpecError as error:
        other = "for a device outside the catalogue, `meshwright hardware probe` measures it"
        raise SpecError(error.fact, where="--node", hint=f"{error.hint}; {other}") from None
    return (int(count) if count else None), device


def parse_rate(text: str, *, where: str, default_unit: str) -> Rate:
    """`400 Gb/s per node`, `50GB/s per device`, `450`; a bare number is in the default unit."""
    match = _RATE.match(text)
    if match is None or not float(match.group("number")):
        hint = "a number with Gb/s (bits) or GB/s (bytes), such as 400Gb/s"
        raise SpecError(f"{text!r} is not a rate", where=where, hint=hint)
    unit = match.group("unit") or default_unit
    per = (match.group("per") or "").lower().replace("gpu", "device").replace("card", "device")
    shown = f"{match.group('number')} {unit}"
    return Rate(float(match.group("number")) * _unit_bytes(unit), shown, per or None)


def _unit_bytes(unit: str) -> float:
    """Bytes per second of `Gb/s`, `Gbit/s` or `GB/s`; a small b is a bit."""
    scale = _SCALE.get(unit[0].lower(), 1.0)
    is_bits = "bit" in unit.lower() or unit.lower().endswith("bps") or "b/s" in unit
    return scale / 8 if is_bits else scale


def parse_link(text: str) -> Rate:
    """The link within a node, in GB/s per device and direction."""
    return parse_rate(text, where="--link", default_unit="GB/s")


def parse_storage(text: str) -> Rate:
    """The storage of the cluster, in GB/s of all nodes together."""
    return parse_rate(text, where="--storage", default_unit="GB/s")


def parse_network(text: str) -> Rate:
    """A rate that says per node or per device: the two differ by the number of devices of a node."""
    rate = parse_rate(text, where="--network", default_unit="Gb/s")
    if rate.per is None:
        raise SpecError(
            f"{text!r} does not say whether it is the network of a node or of a device",
            where="--network",
            hint=f"'{text.strip()} per node' (all its devices share it) or '{text.strip()} per device'",
        )
    return rate


def parse_host_memory(text: str) -> int:
    """`2TB`, `512GiB`: the host memory of one node."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise SpecError(str(error), where="--host-memory", hint="such as 512GiB or 2TB") from None
    if not isinstance(size, int) or size < 2**30:
        raise SpecError(
            f"{text!r} of host memory per node", where="--host-memory", hint="such as 512GiB or 2TB"
        )
    return size


def cluster_toml(name: str, new: NewCluster) -> str:
    """The file: one `[clusters.NAME]` table, every number with its source."""
    if not NAME.match(name):
        raise SpecError(f"{name!r} is no name of a cluster", where="--name", hint="letters, digits, - and _")
    lines = [
        "# Written by `meshwright hardware new`. Rates are bytes per second in one direction, per device.",
        f"[clusters.{name}]",
        f"title = {_quoted(f'{name}, {new.devices_per_node} x {new.device.title} per node')}",
        f"device = {_quoted(new.device.name)}",
        f"devices_per_node = {new.devices_per_node}",
    ]
    return "\n".join([*lines, *(_line(*entry) for entry in _numbers(new))]) + "\n"


def _numbers(new: NewCluster) -> list[tuple[str, float, str]]:
    """(key, value, source) of every number that the file sets."""
    found: list[tuple[str, float, str]] = []
    if new.peer is not None:
        found.append(
            ("peer_bytes_per_second", new.peer.bytes_per_second, f"given: {new.peer.text} per device")
        )
    found.append(("network_bytes_per_second", new.network_bytes_per_device, _network_source(new)))
    if new.host_memory_bytes is not None:
        given = f"given: {show_bytes(new.host_memory_bytes)} per node"
        found.append(("host_memory_bytes", new.host_memory_bytes, given))
    if new.storage is not None:
        source = f"given: {new.storage.text} of all nodes together"
        found.append(("storage_bytes_per_second", new.storage.bytes_per_second, source))
    return found


def _network_source(new: NewCluster) -> str:
    if new.network is None:
        return generic_cluster(new.device).sources["network_bytes_per_second"]
    if new.network.per == "node":
        return f"given: {new.network.text} per node over {new.devices_per_node} devices"
    return f"given: {new.network.text} per device"


def _line(key: str, value: float, source: str) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:g}"
    return f"{key} = {{ value = {shown}, source = {_quoted(source)} }}"


def _quoted(text: str) -> str:
    """A TOML basic string, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def assumed_host_memory(devices_per_node: int) -> int:
    """Host memory of a node whose memory was not given."""
    return devices_per_node * HOST_MEMORY_BYTES_PER_DEVICE
