"""Cores of a host as sysfs shows them."""

from pathlib import Path

import pytest

from meshwright.hardware.cores import host_cores, numa_node_of, numa_nodes, parse_cores, show_cores


def system_of(folder: Path, *, nodes: tuple[str, ...], gpus: dict[str, str], online: str) -> Path:
    """A small sysfs: cores of NUMA nodes, and the node of each PCI device."""
    files = {f"devices/system/node/node{index}/cpulist": cores for index, cores in enumerate(nodes)}
    files |= {f"bus/pci/devices/{address}/numa_node": node for address, node in gpus.items()}
    for name, text in {**files, "devices/system/cpu/online": online}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-7"])
def test_a_list_of_cores_is_read_and_shown(text: str):
    assert show_cores(parse_cores(text)) == text


@pytest.mark.parametrize("text", ["", "x", "3-x", "-"])
def test_no_list_is_no_core(text: str):
    assert parse_cores(text) == frozenset()


def test_numa_nodes_of_gpus(tmp_path: Path):
    gpus = {"0000:17:00.0": "0", "0000:b3:00.0": "1", "0000:01:00.0": "-1"}
    system = system_of(tmp_path, nodes=("0-3", "4-7", ""), gpus=gpus, online="0-7")
    assert numa_nodes(system=system) == {0: parse_cores("0-3"), 1: parse_cores("4-7")}
    assert numa_node_of("0000:B3:00.0", system=system) == 1
    assert numa_node_of("0000:01:00.0", system=system) is None  # -1: the firmware does not say
    assert numa_node_of("0000:99:00.0", system=system) is None


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job", "fs/cgroup/job/cpuset.cpus.effective"),
        ("3:cpuset:/job", "fs/cgroup/cpuset/job/cpuset.effective_cpus"),
    ],
)
def test_the_cores_of_a_container(tmp_path: Path, line: str, file: str):
    system = system_of(tmp_path, nodes=("0-7",), gpus={}, online="0-7")
    cgroups = tmp_path / "cgroup"
    cgroups.write_text(f"1:memory:/other\n{line}\n")
    assert show_cores(host_cores(system=system, cgroups=cgroups)) == "0-7"
    (system / file).parent.mkdir(parents=True)
    (system / file).write_text("2-5\n")
    assert show_cores(host_cores(system=system, cgroups=cgroups)) == "2-5"
