"""Devices and clusters by name, and the errors for a wrong name or file."""

from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.hardware import cluster_names, device_names, find_device, parse_cluster
from meshwright.hardware.catalogue import built_in_clusters, built_in_devices

NAMED = [
    "v100",
    "a100-40gb",
    "a100-64gb",
    "a100-80gb",
    "h100",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "gh200",
    "b200",
    "b300",
    "gb200",
    "gb300",
]
NAMED += ["l40s", "rtx4090", "mi300x", "mi325x", "mi355x", "cpu"]
NAMED += ["rtx3090", "rtx5090", "a6000", "rtxpro6000", "a10", "l4", "t4", "h20"]
GEFORCE = ["rtx3060", "rtx3080", "rtx3090", "rtx4060", "rtx4060ti", "rtx4070", "rtx4080", "rtx4090"]
GEFORCE += ["rtx5060ti", "rtx5070", "rtx5070ti", "rtx5080", "rtx5090"]
NAMED += GEFORCE
CLUSTERS = {"dgx-a100", "dgx-h100", "dgx-h200", "leonardo", "lisa", "berzelius"}
CLUSTERS |= {"alps", "jupiter", "isambard-ai", "hgx-h20", "aws-g6", "aws-g4dn"}
# Dense TFLOP/s of the course decks: fp32, tf32, 16 bits, fp8.
DECK_PEAKS = {
    "p100": {"fp32": 10.6, "fp16": 21},
    "v100": {"fp32": 14.9, "fp16": 119},
    "a100-80gb": {"fp32": 19.5, "tf32": 156, "bf16": 312, "int8": 624},
    "h100": {"fp32": 66.9, "bf16": 989, "fp8": 1979, "int8": 1979},
    "b200": {"fp32": 80, "tf32": 1100, "bf16": 2250, "fp8": 4500, "int8": 4500, "fp6": 4500, "fp4": 9000},
}
MINE = """
[devices.toy]
memory_bytes = 1000000000
memory_bytes_per_second = 1e9
num_sms = 2
[devices.toy.peak_flops_per_second]
bf16 = 1e12
[devices.toy.links]
peer = 2e9
host = 1e9
[clusters.desk]
device = "toy"
devices_per_node = 2
network_bytes_per_second = 1e8
"""


@pytest.mark.parametrize("name", NAMED)
def test_every_promised_device_is_known(name: str) -> None:
    assert name in device_names()


def test_every_promised_cluster_is_known() -> None:
    assert set(cluster_names()) == CLUSTERS


@pytest.mark.parametrize("name", GEFORCE)
def test_tensor_rates_of_consumer_cards_are_with_fp32_accumulation(name: str) -> None:
    """Twice the rate of tf32, which always accumulates in fp32; fp16 accumulation would be four times."""
    device = find_device(name)
    assert device.peak("bf16") == device.peak("fp16") == pytest.approx(2 * device.peak("tf32"), rel=0.01)
    assert "PCIe" in device.sources["links.peer"]
    assert parse_cluster(f"{name}:2x2").network.bytes_per_second == 12.5e9  # one plain adapter


def test_a_grace_hopper_reaches_its_host_over_c2c() -> None:
    for name in ("alps", "jupiter", "isambard-ai"):
        cluster = parse_cluster(name)
        assert (cluster.devices_per_node, cluster.host.name) == (4, "c2c")


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v5e:4x4", "TPU v4", "v5litepod-16", "trn2:16", "gaudi3:8"])
def test_another_kind_of_accelerator_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(SpecError, match="not supported: PyTorch reaches it through") as caught:
        parse_cluster(name)
    assert "h100:8x4" in caught.value.hint


@pytest.mark.parametrize("name", DECK_PEAKS)
def test_peaks_are_the_decks(name: str) -> None:
    device = find_device(name)
    for precision, tflops in DECK_PEAKS[name].items():
        # The decks round to the last printed digit.
        assert device.peak(precision) / 1e12 == pytest.approx(tflops, abs=0.51 if tflops > 20 else 0.05)


def test_every_number_has_a_source() -> None:
    for device in built_in_devices().values():
        numbers = 3 + 2 + len(device.peak_flops_per_second) + len(device.best_matmul_flops_per_second)
        assert len(device.sources) == numbers + len(device.sustained_share)
        assert all(len(source) > 3 for source in device.sources.values())
    for cluster in built_in_clusters().values():
        assert all(len(source) > 3 for source in cluster.sources.values())


def test_no_device_is_faster_than_its_data_sheet() -> None:
    for device in built_in_devices().values():
        for precision in device.best_matmul_flops_per_second:
            assert device.matmul_ceiling(precision) < device.peak(precision)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100:8x16", 16, 8),
        ("h100:64", 8, 8),
        ("h100:4", 1, 4),
        ("h100", 1, 8),
        ("leonardo:16", 16, 4),
        ("leonardo", 1, 4),
        ("dgx-h100:4", 4, 8),
        ("gb200:256", 4, 64),
        ("A100 SXM 80GB:8x2", 2, 8),
    ],
)
def test_on(text: str, nodes: int, per_node: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.devices_per_node) == (nodes, per_node)
    assert cluster.num_devices == nodes * per_node


def test_leonardo_has_a_quarter_of_the_nodes_network_per_device() -> None:
    leonardo = parse_cluster("leonardo:2")
    assert leonardo.network.bytes_per_second * leonardo.devices_per_node * 8 == pytest.approx(400e9)
    assert leonardo.device.name == "a100-64gb"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1000:8", "did you mean 'h100'"),
        ("leonrdo:2", "did you mean 'leonardo'"),
        ("dgx-h100:99999", "1 to 2048 nodes"),
        ("leonardo:8x2", "4 devices per node"),
        ("h100:0", "0 devices"),
        ("h100:8x", "'8x' is not a number of devices write h100:8"),
        ("leonardo:-1", "'-1' is not a number of nodes"),
        ("cluster.yaml", "`meshwright hardware new`"),
        ("h100:13", "multiple of 8"),
        ("h100:99999999x2", "between 1 and 1,000,000"),
        ("", "h100:8x16"),
        ("nothing.toml", "[clusters.NAME]"),
    ],
)
def test_the_error_for_a_wrong_cluster_has_a_hint(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster(text)
    assert expected in f"{caught.value.fact} {caught.value.hint}"


def test_a_user_file_adds_a_device_and_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    cluster = parse_cluster(f"{tmp_path / 'mine.toml'}:3")
    assert (cluster.name, cluster.device.name, cluster.num_devices) == ("desk", "toy", 6)
    assert cluster.device.peak("bf16") == 1e12


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("num_sms = 2", ""), "num_sms"),
        (("num_sms = 2", "num_sms = -1"), "not a positive"),
        (("memory_bytes = 1000000000", "memory_byte = 1"), "memory_bytes"),
        (('device = "toy"', 'device = "toi"'), "toy"),
        (("[clusters.desk]", "[clusters.desk"), "cannot read"),
        (("network_bytes_per_second = 1e8", 'network_bytes_per_second = "fast"'), "network_bytes_per_second"),
    ],
)
def test_a_wrong_user_file_names_the_place(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    (tmp_path / "mine.toml").write_text(MINE.replace(*change))
    with pytest.raises(SpecError) as caught:
        parse_cluster(str(tmp_path / "mine.toml"))
    assert expected in str(caught.value)


def test_a_precision_that_a_device_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match="has no fp8 rate"):
        find_device("a100").peak("fp8")


def test_host_memory_that_is_assumed_follows_the_devices_of_a_node() -> None:
    """A workstation with one card has no host of eight; a cluster whose host is known keeps it."""
    gib = [parse_cluster(on).host_memory_bytes / 2**30 for on in ("rtx4090:1", "rtx4090:4", "h100:8x2")]
    assert gib == [128, 512, 1024]
    assert parse_cluster("h100:64").with_devices(4).host_memory_bytes / 2**30 == 512
    assert parse_cluster("leonardo:2x1").host_memory_bytes == parse_cluster("leonardo:1").host_memory_bytes
