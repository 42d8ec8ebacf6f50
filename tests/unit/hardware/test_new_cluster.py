"""The answers of `hardware new`: units, per node or per device, and the file that --on reads."""

from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.hardware import find_device, parse_cluster
from meshwright.hardware.new_cluster import (
    NewCluster,
    cluster_toml,
    parse_host_memory,
    parse_link,
    parse_network,
    parse_node,
    parse_storage,
)


@pytest.mark.parametrize(
    ("text", "count", "device"),
    [
        ("8 x h100", 8, "h100"),
        ("8xh100", 8, "h100"),
        ("4 A100 SXM 80GB", 4, "a100-80gb"),
        ("1 x 4090", 1, "rtx4090"),
        ("h200", None, "h200"),
        ("4090", None, "rtx4090"),
    ],
)
def test_devices_of_a_node(text: str, count: int | None, device: str) -> None:
    found = parse_node(text)
    assert (found[0], found[1].name) == (count, device)


@pytest.mark.parametrize(
    ("text", "bytes_per_second", "per"),
    [
        ("400 per device", 50e9, "device"),
        ("400Gb/s per node", 50e9, "node"),
        ("400 Gbit/s per GPU", 50e9, "device"),
        ("3.2 Tb/s per node", 400e9, "node"),
        ("25 GB/s per device", 25e9, "device"),
        ("100 gbps per node", 12.5e9, "node"),
    ],
)
def test_a_network_in_bits_or_bytes(text: str, bytes_per_second: float, per: str) -> None:
    rate = parse_network(text)
    assert (rate.bytes_per_second, rate.per) == (bytes_per_second, per)


def test_a_network_must_say_per_node_or_per_device() -> None:
    with pytest.raises(
        SpecError, match="does not say whether it is the network of a node or of a device"
    ) as caught:
        parse_network("400")
    assert "'400 per node'" in caught.value.hint


@pytest.mark.parametrize("text", ["nvlink", "", "0", "-3", "12 parsecs"])
def test_other_text_is_no_rate(text: str) -> None:
    with pytest.raises(SpecError, match="is not a rate"):
        parse_link(text)


@pytest.mark.parametrize("text", ["1 potato", "12", "lots"])
def test_other_text_is_no_memory(text: str) -> None:
    with pytest.raises(SpecError):
        parse_host_memory(text)


def test_on_reads_what_is_written(tmp_path: Path) -> None:
    new = NewCluster(
        find_device("h100"),
        4,
        peer=parse_link("200"),
        network=parse_network("200 per node"),
        host_memory_bytes=parse_host_memory("512GiB"),
        storage=parse_storage("20"),
    )
    path = tmp_path / "mine.toml"
    path.write_text(cluster_toml("mine", new))
    cluster = parse_cluster(f"{path}:3")
    assert (cluster.name, cluster.num_nodes, cluster.devices_per_node) == ("mine", 3, 4)
    assert cluster.peer.bytes_per_second == 200e9
    assert cluster.network.bytes_per_second == pytest.approx(25e9 / 4)
    assert cluster.sources["network_bytes_per_second"] == "given: 200 Gb/s per node over 4 devices"
    assert cluster.host_memory_bytes == 512 * 2**30
    assert cluster.storage_bytes_per_second == 20e9


def test_what_is_not_given_stays_an_assumption(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_toml("mine", NewCluster(find_device("h100"), 8)))
    cluster = parse_cluster(str(path))
    assert cluster.network.bytes_per_second == 50e9
    assert cluster.sources["network_bytes_per_second"].startswith("assumed")
    assert "host_memory_bytes" not in cluster.sources
