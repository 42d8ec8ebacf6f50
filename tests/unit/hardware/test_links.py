"""Links of a host as sysfs shows them."""

from pathlib import Path

from meshwright.hardware.links import infiniband_ports, network_interfaces


def test_interfaces_and_ports(tmp_path: Path):
    files = {
        "class/net/lo/operstate": "unknown",
        "class/net/eth0/operstate": "up",
        "class/net/eth0/speed": "25000",
        "class/net/ib0/operstate": "down",
        "class/net/ib0/speed": "-1",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "class/infiniband/mlx5_0/device/numa_node": "1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert network_interfaces(system=tmp_path) == [
        {"name": "eth0", "state": "up", "gigabits_per_second": 25.0},
        {"name": "ib0", "state": "down", "gigabits_per_second": None},
    ]
    assert infiniband_ports(system=tmp_path) == [
        {"hca": "mlx5_0", "port": "1", "state": "ACTIVE", "rate": "200 Gb/sec (4X HDR)", "numa_node": "1"}
    ]
